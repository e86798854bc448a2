"""Keys and rate limits of the gateway."""

import contextlib
import stat

import msgspec
import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeyRing, KeySpec, create_key, hash_key, load_keys
from penstock.gateway.limits import Account, FeedbackAccount
from penstock.messages.errors import ConfigError

KEY = KeySpec(
    key_id="k", key_hash=hash_key("s"), rpm_limit=60, tpm_limit=600, max_parallel_requests=2
)


def refused(account: Account, now: float) -> ApiError:
    with pytest.raises(ApiError) as caught:
        account.enter(KEY, now)
    return caught.value


def test_a_minute_s_requests_may_come_at_once_and_refill_evenly():
    account = Account(KEY, 0.0)
    for _ in range(60):
        account.enter(KEY, 0.0)
        account.leave(0, 0.0)
    error = refused(account, 0.25)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.retry_after_s == pytest.approx(0.75)
    account.enter(KEY, 1.0)


def test_tokens_are_charged_afterwards_and_owed():
    account = Account(KEY, 0.0)
    account.enter(KEY, 0.0)
    account.leave(900, 0.0)
    assert "tokens per minute" in refused(account, 0.0).message
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert refused(account, 30.0).retry_after_s == pytest.approx(0.1)
    account.enter(KEY, 31.0)


def test_parallel_requests_are_counted_per_key():
    account = Account(KEY, 0.0)
    account.enter(KEY, 0.0)
    account.enter(KEY, 0.0)
    assert refused(account, 0.0).code == "too_many_parallel_requests"
    account.leave(0, 0.0)
    account.enter(KEY, 0.0)


def test_only_the_exact_secret_is_found():
    ring = KeyRing([KEY])
    assert ring.find("Bearer s") == KEY
    assert ring.find("bearer  s ") == KEY
    for header in ("", "s", "Basic s", "Bearer", "Bearer S", f"Bearer {KEY.key_hash}"):
        assert ring.find(header) is None


def test_keys_come_from_a_file_whose_faults_are_named(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nkey_id = "a"\nkey_hash = "{hash_key("x")}"\nrpm_limit = 3\n')
    (key,) = load_keys(path)
    assert (key.key_id, key.rpm_limit, key.training_consent) == ("a", 3, False)
    path.write_text('[[keys]]\nkey_id = "a"\nkey_hash = 3\n')
    with pytest.raises(ConfigError, match=r"keys.toml.*\$\.keys\[0\]\.key_hash|\$\.keys"):
        load_keys(path)
    for bad in ("short", hash_key("x").upper()):
        path.write_text(f'[[keys]]\nkey_id = "a"\nkey_hash = "{bad}"\n')
        with pytest.raises(ConfigError, match=r"keys.toml: .*\$\.keys\[.*\]\.key_hash"):
            load_keys(path)
    path.write_text(f'[[keys]]\nkey_id = "a"\nkey_hash = "{hash_key("x")}"\nrpm_limit = 0\n')
    with pytest.raises(ConfigError, match=r">= 1 .*rpm_limit"):
        load_keys(path)


@pytest.mark.parametrize(
    ("withheld", "consents"),
    [("storage", (False, False)), ("training", (True, False)), ("", (True, True))],
)
def test_what_a_tenant_withholds_none_of_its_keys_has(tmp_path, withheld, consents):
    path = tmp_path / "keys.toml"
    given = "storage_consent = true\ntraining_consent = true\n"
    text = '[[tenants]]\ntenant = "acme"\n' + (f"{withheld}_consent = false\n" if withheld else "")
    for name in ("acme", "other"):
        text += f'[[keys]]\nkey_id = "{name}-1"\nkey_hash = "{hash_key(name)}"\n'
        text += f'tenant = "{name}"\n{given}'
    path.write_text(text)
    acme, other = load_keys(path)
    assert (acme.storage_consent, acme.training_consent) == consents
    assert (other.storage_consent, other.training_consent) == (True, True)


def test_a_created_key_is_private_and_kept(tmp_path):
    path = tmp_path / "run" / "gateway_key"
    key = create_key(path, key_id="local", has_consent=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyRing([key]).find(f"Bearer {path.read_text().strip()}") == key
    assert create_key(path, key_id="local", has_consent=True) == key


def test_feedback_is_bounded_by_key_by_user_and_by_size():
    key = msgspec.structs.replace(
        KEY, feedback_rpm_limit=5, user_feedback_rpm_limit=3, feedback_kib_limit=4
    )

    def admitted(account: FeedbackAccount, users: list[str], num_bytes: int) -> list[str]:
        found = []
        for user in users:
            with contextlib.suppress(ApiError):
                account.charge(key, num_bytes, 0.0)
                account.charge_user(key, user, 0.0)
                found.append(user)
        return found

    assert admitted(FeedbackAccount(key, 0.0), ["a"] * 9, 1) == ["a"] * 3
    assert admitted(FeedbackAccount(key, 0.0), ["a", "b"] * 9, 1) == ["a", "b", "a", "b", "a"]
    account = FeedbackAccount(key, 0.0)
    assert admitted(account, ["a", "b", "c"], 2048) == ["a", "b"]
    with pytest.raises(ApiError, match="KiB") as caught:
        account.charge(key, 2048, 0.0)
    assert caught.value.retry_after_s == pytest.approx(30.0)
    account.charge(key, 2048, 31.0)
    account.charge_user(key, "c", 31.0)
