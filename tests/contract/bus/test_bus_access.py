"""Servers that `[bus]` names: who we are, TLS, and what is said when they cannot be used."""

import asyncio
import base64
import datetime
import ipaddress
import itertools
import json
import os
import time

import msgspec
import pytest
from tests.contract.bus.bus_world import DEADLINE_S, step
from tests.contract.bus.plain_server import plain_server

from penstock.infra.bus.jetstream import access, connection, provision
from penstock.infra.bus.jetstream.access import Access, as_access, open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.settings import BusSection
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import ConfigError
from penstock.messages.training import CheckpointSaved, StepCompleted

GIB = 1 << 30


def jetstream(folder, store_bytes=1 << 40):
    return f'jetstream {{ store_dir: "{folder}/js", max_file_store: {store_bytes} }}'


async def use(section: BusSection, *, provisions: bool = True) -> None:
    """Connect, provision, publish and read."""
    bus = await NatsBus.connect(
        open_access(section), run_id="r1", store=MemoryStore(), name="tester"
    )
    try:
        if provisions:
            await bus.provision()
            await bus.publish([step(1)])
            found = await bus.last(StepCompleted)
            assert found is not None and found.event == step(1)
    finally:
        await bus.close()


def section(port: int, scheme: str = "nats", **fields) -> BusSection:
    return BusSection(servers=[f"{scheme}://127.0.0.1:{port}"], **fields)


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"servers": ["nats://secret@host:4222"]}, r"\$\.servers"),
        ({"servers": ["host:4222"]}, r"\$\.servers"),
        ({"servers": ["nats://h:1"], "token_file": "a", "nkey_seed_file": "b"}, "at most one of"),
        ({"servers": ["nats://h:1"], "tls_cert": "a"}, "tls_cert and tls_key together"),
        ({"servers": ["nats://h:1"], "num_replicas": 2}, "expected 1, 3 or 5, got 2"),
        ({"servers": ["nats://h:1"], "server_path": "x"}, "expected no servers"),
        ({"num_replicas": 3}, r"bus\.num_replicas: expected bus\.servers with it"),
        ({"token_file": "x"}, r"bus\.token_file: expected bus\.servers with it"),
        ({"url": "nats://h:1"}, "unknown field `url`"),
    ],
)
def test_wrong_settings_are_named(fields, words):
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(fields, BusSection)


@pytest.mark.parametrize(
    "field", ["nkey_seed_file", "credentials_file", "token_file", "tls_ca", "tls_cert"]
)
def test_a_missing_file_is_named_before_anything_is_sent(tmp_path, field):
    key = {"tls_key": str(tmp_path / "k")} if field == "tls_cert" else {}
    with pytest.raises(ConfigError, match=rf"bus\.{field}: .*absent"):
        open_access(section(1, **{field: str(tmp_path / "absent")}, **key))


def test_no_secret_is_shown():
    found = as_access("nats://s3cret@127.0.0.1:4222")
    assert "s3cret" not in repr(found) + str(found.servers) + found.place
    assert found.options == {"token": "s3cret"}


async def test_a_token_comes_from_its_file_and_a_wrong_one_is_refused(tmp_path):
    config = f'authorization {{ token: "right" }}\n{jetstream(tmp_path)}'
    right = write(tmp_path / "right", "right\n")
    wrong = write(tmp_path / "wrong", "wrong")
    with plain_server(tmp_path, config) as port:
        await use(section(port, token_file=right))
        with pytest.raises(ConfigError, match=r"bus\.token_file: expected what nats://127.0.0.1"):
            await use(section(port, token_file=wrong))
        with pytest.raises(ConfigError, match="bus: one of nkey_seed_file, credentials_file, to"):
            await use(section(port))


async def test_servers_that_are_away_are_named(monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_S_MAX", 0.5)
    with pytest.raises(ConfigError, match=r"bus\.servers: expected NATS servers at nats://127.0.0"):
        await use(section(9))


async def test_a_server_without_jetstream_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(provision, "START_S_MAX", 1.0)
    refused = pytest.raises(ConfigError, match=r"bus\.servers: expected JetStream at .*`-js`")
    with plain_server(tmp_path, "") as port, refused:
        await use(section(port))


async def test_a_server_with_little_storage_says_what_is_needed_and_less_can_be_reserved(tmp_path):
    with plain_server(tmp_path, jetstream(tmp_path, 2 * GIB)) as port:
        with pytest.raises(ConfigError, match=r"bus\.max_bytes: .*reserve 82\.0 GiB on disk.*less"):
            await use(section(port))
        await use(section(port, max_bytes=64 << 20))


async def test_more_replicas_than_servers_are_named(tmp_path):
    refused = pytest.raises(ConfigError, match=r"bus\.num_replicas: expected at most .* got 3")
    with plain_server(tmp_path, jetstream(tmp_path)) as port, refused:
        await use(section(port, num_replicas=3))


async def test_settings_that_would_take_from_other_runs_are_refused(tmp_path):
    """A stream that holds more than its new bound would refuse the events of every run."""
    with plain_server(tmp_path, jetstream(tmp_path)) as port:
        bus = await NatsBus.connect(
            open_access(section(port)), run_id="r1", store=MemoryStore(), name="tester"
        )
        await bus.provision()
        await bus.publish([step(n) for n in range(200)])
        with pytest.raises(ConfigError, match=r"bus\.max_bytes: .*PS_TRAINING holds \d+ bytes"):
            await use(section(port, max_bytes=4096))
        found = [d async for d in bus.follow([StepCompleted], stop_at_end=True)]
        assert len(found) == 200
        await bus.close()


def seed_of(kind: bytes = b"") -> tuple[str, str, object]:
    nkeys = pytest.importorskip("nkeys")
    prefix = {b"": nkeys.PREFIX_BYTE_USER, b"A": nkeys.PREFIX_BYTE_ACCOUNT}.get(
        kind, nkeys.PREFIX_BYTE_OPERATOR
    )
    seed = nkeys.encode_seed(os.urandom(32), prefix).decode()
    pair = nkeys.from_seed(bytearray(seed.encode()))
    return seed, pair.public_key.decode(), pair


async def test_an_nkey_is_proved_and_another_is_refused(tmp_path):
    seed, public, _ = seed_of()
    other, _, _ = seed_of()
    config = f'authorization {{ users: [ {{ nkey: "{public}" }} ] }}\n{jetstream(tmp_path)}'
    with plain_server(tmp_path, config) as port:
        await use(section(port, nkey_seed_file=write(tmp_path / "a", seed)))
        with pytest.raises(ConfigError, match=r"bus\.nkey_seed_file: expected what"):
            await use(section(port, nkey_seed_file=write(tmp_path / "b", other)))
    with pytest.raises(ConfigError, match=r"bus\.nkey_seed_file: .*expected the seed of a user"):
        open_access(section(1, nkey_seed_file=write(tmp_path / "c", "SUnonsense")))


def signed(claims: dict, issuer: object) -> str:
    """Return a JWT as NATS has them."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    text = f"{part(json.dumps(head).encode())}.{part(json.dumps(claims).encode())}"
    return f"{text}.{part(issuer.sign(text.encode()))}"


def claims(issuer: str, subject: str, kind: str, **fields) -> dict:
    data = {"type": kind, "version": 2, **fields.pop("nats", {})}
    base = {"jti": "x", "iat": int(time.time()), "iss": issuer, "sub": subject, "name": kind}
    return base | {"nats": data} | fields


def creds(token: str, seed: str) -> str:
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


async def test_credentials_are_used_and_expired_or_foreign_ones_are_told(tmp_path):
    _, operator, operator_key = seed_of(b"O")
    _, account, account_key = seed_of(b"A")
    seed, user, _ = seed_of()
    limits = dict.fromkeys(("subs", "conn", "leaf", "data", "payload", "imports", "exports"), -1)
    limits |= dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    limits |= {"wildcards": True}
    own = claims(operator, account, "account", nats={"limits": limits})
    _, system, _ = seed_of(b"A")
    few = {name: limits[name] for name in ("subs", "conn", "leaf", "data", "payload")}
    theirs = signed(claims(operator, system, "account", nats={"limits": few}), operator_key)
    config = (
        f"operator: {signed(claims(operator, operator, 'operator'), operator_key)}\n"
        f"resolver: MEMORY\nsystem_account: {system}\nresolver_preload: "
        f"{{ {system}: {theirs}, {account}: {signed(own, operator_key)} }}\n"
        f"{jetstream(tmp_path)}"
    )

    def file(name: str, issuer: str, key: object, **fields) -> str:
        rights = {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        token = signed(claims(issuer, user, "user", nats=rights, **fields), key)
        return write(tmp_path / name, creds(token, seed))

    _, stranger, stranger_key = seed_of(b"A")
    with plain_server(tmp_path, config) as port:
        await use(section(port, credentials_file=file("good", account, account_key)))
        for life_s in (2, 4, 8, 12):  # The longer ones for a process that is slow to connect.
            brief = file("brief", account, account_key, exp=int(time.time()) + life_s)
            if await use_until_expired(section(port, credentials_file=brief)):
                break
        else:
            raise AssertionError("expired before anything was published")
        foreign = file("foreign", stranger, stranger_key)
        with pytest.raises(ConfigError, match=r"bus\.credentials_file: expected what"):
            await use(section(port, credentials_file=foreign))
    past = int(time.time()) - 60
    with pytest.raises(ConfigError, match=r"bus\.credentials_file: .*: expired at 20.* UTC"):
        open_access(section(1, credentials_file=file("old", account, account_key, exp=past)))
    with pytest.raises(ConfigError, match=r"bus\.credentials_file: .*expected a user's JWT and se"):
        open_access(section(1, credentials_file=write(tmp_path / "x", "nothing")))


async def use_until_expired(own: BusSection) -> bool:
    """Publish until the servers end the connection: an error that names the file, at once.

    Returns:
        Whether anything was published before.

    """
    try:
        bus = await NatsBus.connect(
            open_access(own), run_id="r1", store=MemoryStore(), name="tester"
        )
    except ConfigError:
        return False
    following = asyncio.create_task(anext(bus.follow([CheckpointSaved])))
    expired = r"bus\.credentials_file: .*(?i:authentication expired)"
    numbers = itertools.count(2)
    try:
        with pytest.raises(ConfigError, match=expired):
            async with asyncio.timeout(DEADLINE_S):
                for number in numbers:
                    await bus.publish([step(number)])
        with pytest.raises(ConfigError, match=expired):
            await asyncio.wait_for(following, DEADLINE_S)
    finally:
        await bus.close()
    return next(numbers) > 3


def certificates(folder) -> dict[str, str]:
    """Write an authority, and the certificates of a server and a client that it signed."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)
    paths: dict[str, str] = {}
    authority = None
    for name in ("ca", "server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer, issuer_key = authority or (own, key)
        authority = authority or (own, key)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        made = (
            x509.CertificateBuilder(issuer, own, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(name == "ca", None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
                critical=False,
            )
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(issuer_key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        paths[name] = write(folder / f"{name}.pem", made.public_bytes(pem).decode())
        paths[f"{name}_key"] = write(folder / f"{name}.key", secret.decode())
    return paths


async def test_tls_is_checked_on_both_sides_and_never_given_up(tmp_path):
    paths = certificates(tmp_path)
    tls = f'cert_file: "{paths["server"]}", key_file: "{paths["server_key"]}"'
    mutual = f'{tls}, ca_file: "{paths["ca"]}", verify: true'
    ours = {"tls_cert": paths["client"], "tls_key": paths["client_key"]}
    own = jetstream(tmp_path)
    with plain_server(tmp_path, f"tls {{ {tls} }}\n{own}") as port:
        await use(section(port, "tls", tls_ca=paths["ca"]))
        with pytest.raises(ConfigError, match=r"bus\.tls_ca: .*verify failed"):
            await use(section(port, "tls"))
    with plain_server(tmp_path, f"tls {{ {mutual} }}\n{own}") as port:
        await use(section(port, tls_ca=paths["ca"], **ours))
    refused = pytest.raises(ConfigError, match=r"bus\.servers: .*a server that requires TLS")
    with plain_server(tmp_path, own) as port, refused:
        await use(section(port, "tls"))
    with pytest.raises(ConfigError, match=r"bus\.tls_ca: .*expected certificates in PEM"):
        open_access(section(1, tls_ca=write(tmp_path / "no", "nothing")))
    with pytest.raises(ConfigError, match=r"bus\.tls_cert, bus\.tls_key: .*certificate and its"):
        wrong = {"tls_cert": paths["client"], "tls_key": paths["server_key"]}
        open_access(section(1, **wrong))


def test_an_access_is_not_printed_with_its_options():
    found = Access(servers=["nats://h:1"], options={"token": "s3cret"})
    assert "s3cret" not in f"{found} {found!r}"


@pytest.mark.parametrize("field", ["nkey_seed_file", "credentials_file"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, field):
    monkeypatch.setattr(access, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"bus\.{field}: install the extra: .*nkeys"):
        open_access(section(1, **{field: write(tmp_path / "secret", "SU")}))
