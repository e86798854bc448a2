"""The arguments of `penstock show|label`; their code is imported only when they run."""

from penstock.infra.commands.parsers import Commands, add_command, add_host_file


def add_show(commands: Commands) -> None:
    """Register the command."""
    text = "show a run's episodes, or one of them turn by turn"
    show = add_command(
        commands, "show", "commands.show:show_command", text, of_run=True, has_json=True
    )
    show.add_argument("episode", nargs="?", metavar="EPISODE", help="its id, or how that begins")
    text = "list those with this, e.g. outcome=failed or step=12"
    show.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=text)
    show.add_argument("-n", "--limit", type=int, default=40, help="length of the list")
    add_host_file(show)


def add_label(commands: Commands) -> None:
    """Register the command."""
    text = "say whether an episode is good; judges are compared with it (judge calibrate)"
    label = add_command(
        commands, "label", "commands.label:label_command", text, of_run=True, has_json=True
    )
    label.add_argument("episode", metavar="EPISODE", help="its id, or how that begins")
    text = "good, bad, a score from 0 to 1, or none, which takes a label back"
    label.add_argument("value", metavar="LABEL", help=text)
    label.add_argument("--comment", default="", metavar="TEXT", help="why, up to 2000 characters")
    label.add_argument("--by", default="", metavar="NAME", help="who says so (default: your login)")
    add_host_file(label)
