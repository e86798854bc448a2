"""Container images from files: all kinds give the same layers; a hostile one leaves nothing."""

import gzip
import io
import stat
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.container_images import Image, tar_of

from penstock.envs.microvm.images.layers import load_image, load_layer, remove_unnamed
from penstock.envs.microvm.oci import layer_tar, sources
from penstock.envs.microvm.oci.build import BuildOptions
from penstock.envs.microvm.oci.erofs import read_erofs
from penstock.envs.microvm.oci.layer_tar import ConvertRequest, convert_here
from penstock.envs.microvm.oci.prepare import known_image, prepare_image, pull_image
from penstock.envs.microvm.oci.tree import ImageError, find, merge, walk

LINK = {"type": tarfile.SYMTYPE}
BASE = tar_of(
    ("etc/passwd", {"mode": 0o644}, b"root:x:0:0:r:/root:/bin/sh\napp:x:7:8:a:/home/app:/bin/sh\n"),
    ("bin/tool", {"mode": 0o4755, "uid": 3, "gid": 4}, b"\x7fELF" + bytes(3000)),
    ("bin/same", {"type": tarfile.LNKTYPE, "linkname": "bin/tool"}),
    ("bin/alias", LINK | {"linkname": "tool"}),
    ("old/a", {}, b"1"),
    ("old/b", {}, b"2"),
    ("dev/null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
)
TOP = tar_of(("bin/.wh.alias", {}), ("old/.wh..wh..opq", {}), ("old/c", {}, b"3"))
CONFIG = {"Env": ["A=b=c"], "WorkingDir": "/srv", "User": "app", "Cmd": ["run"]}


async def pull(source, tmp_path, name="x", said=None):
    options = BuildOptions(cache=tmp_path / "vm")
    say = (said if said is not None else []).append
    return await pull_image(source, name=name, options=options, say=say)


def kinds(image, folder):
    return {
        "layout": image.layout(folder / "layout"),
        "archive": image.archive(folder / "oci.tar"),
        "packed": image.archive(folder / "oci.tar.gz", "gzip"),
        "docker": image.docker_save(folder / "docker.tar"),
        "skopeo": image.skopeo(folder / "skopeo"),
    }


@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
async def test_every_kind_of_file_gives_the_same_image(tmp_path, compression):
    image = Image([BASE, TOP], config=CONFIG, compression=compression)
    digests = set()
    for kind, path in kinds(image, tmp_path).items():
        digests.add((await pull(path, tmp_path, kind)).digest)
    assert len(digests) == 1


async def test_layers_are_as_the_image_says(tmp_path):
    said = []
    entry = await pull(
        Image([BASE, TOP], config=CONFIG).layout(tmp_path / "l"), tmp_path, said=said
    )
    path, _ = load_layer("x", tmp_path / "vm")
    image = load_image(path)
    trees = [read_erofs(path.with_name(f"{one}.erofs")) for one in image.layers]
    tool = find(trees, b"/bin/tool")[1]
    assert stat.S_IMODE(tool.mode) == 0o4755
    assert (tool.uid, tool.gid, tool.size) == (3, 4, 3004)
    assert find(trees, b"/bin/same")[1] is tool
    assert find(trees, b"/bin/alias") is None
    assert [find(trees, f"/old/{n}".encode()) is not None for n in "abc"] == [False, False, True]
    assert find(trees, b"/work")[0] == b"/srv"
    assert image.settings.env == {
        "PATH": image.settings.env["PATH"], "HOME": "/home/app", "TERM": "dumb", "A": "b=c",
    }  # fmt: skip
    assert (image.settings.uid, image.settings.gid, image.settings.workdir) == (7, 8, "/srv")
    assert any("1 devices" in one for one in said)
    assert known_image("x", tmp_path / "vm").digest == entry.digest


async def test_shared_layers_are_stored_once_and_collected_with_the_last_image(tmp_path):
    await pull(Image([BASE, TOP]).layout(tmp_path / "a"), tmp_path, "a")
    folder = tmp_path / "vm" / "images"
    before = set(folder.glob("*.erofs"))
    await pull(Image([BASE, tar_of(new="1")]).layout(tmp_path / "b"), tmp_path, "b")
    assert len(set(folder.glob("*.erofs")) - before) == 1
    (folder / "a.json").unlink()
    removed = {path.suffix for path in remove_unnamed(tmp_path / "vm")}
    assert removed == {".erofs", ".image", ".chain"}
    load_layer("b", tmp_path / "vm")
    (folder / "b.json").unlink()
    remove_unnamed(tmp_path / "vm")
    assert [path.name for path in folder.iterdir()] == ["build.lock"]


async def test_an_image_of_many_layers_has_few_disks(tmp_path):
    layers = [BASE, *(tar_of(("n/f", {}, b"%d" % n), (f"n/{n}", {}, b"")) for n in range(20)), TOP]
    await pull(Image(layers).layout(tmp_path / "l"), tmp_path)
    path, _ = load_layer("x", tmp_path / "vm")
    image = load_image(path)
    trees = [read_erofs(path.with_name(f"{one}.erofs")) for one in image.layers]
    assert len(trees) == 6
    assert find(trees, b"/n/f")[1].data == b"19"
    assert all(find(trees, b"/n/%d" % n) for n in range(20))
    assert find(trees, b"/old/a") is None
    assert find(trees, b"/old/c") is not None


HOSTILE = {
    "climbs": (tar_of(("../../etc/x", {}, b"1")), "inside the image"),
    "climbs by a link": (
        tar_of(("a", LINK | {"linkname": "/etc"}), ("a/x", {}, b"1")), "is no folder"),
    "links to nothing": (
        tar_of(("a", {"type": tarfile.LNKTYPE, "linkname": "../../etc/shadow"})), "inside"),
    "links to a folder": (
        tar_of(("d", {"type": tarfile.DIRTYPE}), ("a", {"type": tarfile.LNKTYPE, "linkname": "d"})),
        "hard link"),
    "deep": (tar_of(("a/" * 120 + "x", {}, b"1")), "at most 100 names"),
    "long name": (tar_of(("a" * 300, {}, b"1")), "255 bytes"),
    "long link": (tar_of(("a", LINK | {"linkname": "b" * 5000})), "a link of 5000 bytes"),
    "truncated": (BASE[:2000], "damaged|truncated"),
    "garbage": (b"\x1f\x8b" + bytes(5000), "damaged"),
    "giant header": (
        tar_of(("h", {"type": tarfile.XHDTYPE, "size": 1 << 30})), "header of"),
    "giant file": (tar_of(("big", {"size": 1 << 40})), "more bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
async def test_a_hostile_layer_gets_a_typed_error_and_leaves_nothing(tmp_path, case):
    data, words = HOSTILE[case]
    image = Image([BASE, data], compression="plain")
    with pytest.raises(ImageError, match=words):
        await pull(image.layout(tmp_path / "l"), tmp_path)
    left = [one for one in (tmp_path / "vm" / "images").iterdir() if one.name != "build.lock"]
    # The layer below was whole; no name refers to it, and the collection takes it.
    assert {one.suffix for one in left} <= {".erofs", ".chain"}
    remove_unnamed(tmp_path / "vm")
    assert [one.name for one in (tmp_path / "vm" / "images").iterdir()] == ["build.lock"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda image: image.blobs.update({image.layers[0]["digest"]: b"other"}), "its digest"),
        (lambda image: image.blobs.update({image.config["digest"]: b"{}"}), "its digest"),
        (lambda image: image.blobs.pop(image.layers[0]["digest"]), "no file"),
    ],
)
async def test_a_blob_that_is_another_is_refused(tmp_path, change, words):
    image = Image([BASE])
    change(image)
    with pytest.raises(ImageError, match=words):
        await pull(image.archive(tmp_path / "a.tar"), tmp_path)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Image([BASE], architecture="arm64"), "linux/arm64"),
        (Image([BASE], rootfs={"diff_ids": []}), "diff_ids"),
        (Image([BASE], rootfs={"diff_ids": ["sha256:" + "1" * 64]}), "does not match its digest"),
        (Image([BASE], config={"User": "nobody-here"}), "no user"),
        (Image([BASE], config={"Env": ["A=" + "x" * 100_000]}), "Env"),
        (Image([BASE], config={"Env": 3}), "config.Env|Expected"),
        (Image([tar_of()] * 128), "127 layers"),
    ],
)
async def test_settings_out_of_bounds_are_refused_by_name(tmp_path, image, words):
    with pytest.raises(ImageError, match=words):
        await pull(image.layout(tmp_path / "l"), tmp_path)


async def test_links_of_a_folder_lead_nowhere(tmp_path):
    folder = Image([BASE]).layout(tmp_path / "l")
    (folder / "index.json").unlink()
    (folder / "index.json").symlink_to("/etc/passwd")
    with pytest.raises(ImageError, match=r"expected index\.json"):
        await pull(folder, tmp_path)


@pytest.mark.parametrize("text", [b"", b"no archive", gzip.compress(b"no archive" * 99)])
async def test_a_file_that_is_no_image_is_refused(tmp_path, text):
    (tmp_path / "f").write_bytes(text)
    with pytest.raises(ImageError):
        await pull(tmp_path / "f", tmp_path)


def test_bounds_hold_for_many_files_and_for_little_that_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_tar, "FILES_MAX", 1000)
    (tmp_path / "t").write_bytes(gzip.compress(tar_of(*((f"{n}", {}) for n in range(1001)))))
    with (tmp_path / "out").open("wb+") as out, pytest.raises(ImageError, match="1000 files"):
        convert_here(ConvertRequest(blobs=[str(tmp_path / "t")], target=""), out)
    monkeypatch.setattr(layer_tar, "LAYER_BYTES_MAX", 1 << 20)
    (tmp_path / "t").write_bytes(gzip.compress(tar_of(("bomb", {}, bytes(2 << 20)))))
    with (tmp_path / "out").open("wb+") as out, pytest.raises(ImageError, match="more"):
        convert_here(ConvertRequest(blobs=[str(tmp_path / "t")], target=""), out)


async def test_an_archive_of_many_members_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ARCHIVE_FILES_MAX", 50)
    (tmp_path / "a.tar").write_bytes(tar_of(*((f"{n}", {}) for n in range(60))))
    with pytest.raises(ImageError, match="50 files"):
        await pull(tmp_path / "a.tar", tmp_path)


async def test_an_unknown_image_is_refused_offline(tmp_path):
    options = BuildOptions(cache=tmp_path / "vm", offline=True)
    with pytest.raises(ImageError, match="offline"):
        await prepare_image("debian:12", options=options, say=print)


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["file", "folder", "remove", "opaque"]), PATHS), max_size=6
)


def layer_and_model(changes, model):
    """Return a layer's tar, and the files that an unpacker has after it."""
    members, made = [], {}
    lower = dict(model)
    for what, path in changes:
        above = ["/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 1)]
        if any(made.get(one, "folder") != "folder" for one in above):
            continue
        folder, _, name = path.rpartition("/")
        if what in {"file", "folder"}:
            if made.get(path, what) != what:
                continue
            made |= dict.fromkeys(above, "folder") | {path: what}
            kind = {} if what == "file" else {"type": tarfile.DIRTYPE}
            members.append((path, kind, *([path.encode()] if what == "file" else [])))
        elif what == "remove":
            made |= dict.fromkeys(above, "folder")
            members.append((f"{folder}/.wh.{name}".lstrip("/"), {}))
            lower = {k: v for k, v in lower.items() if not f"{k}/".startswith(f"{path}/")}
        elif made.get(path, "folder") == "folder":
            made |= dict.fromkeys([*above, path], "folder")
            members += [(path, {"type": tarfile.DIRTYPE}), (f"{path}/.wh..wh..opq", {})]
            lower = {k: v for k, v in lower.items() if not k.startswith(f"{path}/")}
    for path, kind in made.items():
        if kind == "file" or lower.get(path) == "file":
            lower = {k: v for k, v in lower.items() if not f"{k}/".startswith(f"{path}/")}
        lower[path] = kind
    return tar_of(*members), lower


@settings(max_examples=150, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=5), st.integers(1, 4))
def test_layers_stack_as_an_unpacker_has_them(tmp_path_factory, layers, num_merged):
    folder = tmp_path_factory.mktemp("layers")
    model, files = {}, []
    for number, changes in enumerate(layers):
        tar, model = layer_and_model(changes, model)
        (folder / f"{number}.tar").write_bytes(tar)
        target = folder / f"{number}.erofs"
        request = ConvertRequest(
            blobs=[str(folder / f"{number}.tar")], lowers=[str(f) for f in files], target=""
        )
        with target.open("wb+") as out:
            convert_here(request, out)
        files.insert(0, target)
    above, below = files[:num_merged], files[num_merged:]
    with (folder / "merged").open("wb+") as out:
        convert_here(
            ConvertRequest(merged=[str(f) for f in above], lowers=[str(f) for f in below],
                           target=""),
            out,
        )  # fmt: skip
    trees = [read_erofs(folder / "merged"), *(read_erofs(one) for one in below)]
    seen = {
        path.decode().lstrip("/"): "folder" if node.is_folder else "file"
        for path, node in walk(merge(trees))
        if not node.is_whiteout
    }
    assert seen == model
    assert all(find(trees, path.encode()) is not None for path in model)


def test_a_folder_of_many_names_reads_back(tmp_path):
    names = {f"name-{n:05d}-{'x' * (n % 60)}": b"y" * (n % 5000) for n in range(3000)}
    (tmp_path / "t").write_bytes(tar_of(*((f"d/{k}", {}, v) for k, v in names.items())))
    with (tmp_path / "out").open("wb+") as out:
        convert_here(ConvertRequest(blobs=[str(tmp_path / "t")], target=""), out)
    found = read_erofs(tmp_path / "out").children[b"d"].children
    assert {k.decode(): v.size for k, v in found.items()} == {k: len(v) for k, v in names.items()}
    data = (tmp_path / "out").read_bytes()
    for name, node in found.items():
        content = node.data or data[node.block << 12 :][: node.size]
        assert content == names[name.decode()]
    assert io.BytesIO(data).getbuffer().nbytes % 4096 == 0
