"""What is taken out of text from workers, and what stays."""

import io
import logging
import re
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.redact import (
    HIDDEN,
    LONGEST,
    log_without_secrets,
    redacted,
    redacted_all,
    redacted_end,
    writable,
)
from tests import ROOT

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("AWS_SECRET_ACCESS_KEY=wJalr/x+y", f"AWS_SECRET_ACCESS_KEY={HIDDEN}"),
        ("MY_SECRET_KEY='a b c' is wrong", f"MY_SECRET_KEY='{HIDDEN}' is wrong"),
        ("HF_TOKEN: x", f"HF_TOKEN: {HIDDEN}"),
        ("refused: token=abc", f"refused: token={HIDDEN}"),
        ("hf_token='a b'", f"hf_token='{HIDDEN}'"),
        ('{"token": "abcdef123456"}', f'{{"token": "{HIDDEN}"}}'),
        ("github_pat_11ABC0_xyzxyz and ghs_0123456789", f"{HIDDEN} and {HIDDEN}"),
        (
            "GET https://h/c?sv=1&sig=Ab%2Fc&key=z",
            f"GET https://h/c?sv=1&sig={HIDDEN}&key={HIDDEN}",
        ),
        ('password="correct horse"; user=me', f'password="{HIDDEN}"; user=me'),
        (r"{\"password\": \"a b\", \"user\": 1}", rf"{{\"password\": \"{HIDDEN}\", \"user\": 1}}"),
        (r"password='it\'s long' x", f"password='{HIDDEN}' x"),
        ('password="never closed\nnext line', f'password="{HIDDEN}\nnext line'),
        ("[('x-api-key', 'ab c'), ('a', 'b')]", f"[('x-api-key', '{HIDDEN}'), ('a', 'b')]"),
        ("[(b'authorization', b'Bearer q')]", f"[(b'authorization', '{HIDDEN}')]"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("authorization: 0123456", f"authorization: {HIDDEN}"),
        ("said Bearer abc.dEf-ghi_jkl", f"said Bearer {HIDDEN}"),
        ("Cookie: a=b; c=d\nHost: h", f"Cookie: {HIDDEN}\nHost: h"),
        ("run --api-key hunter2 --port 1", f"run --api-key {HIDDEN} --port 1"),
        ("['run', '--token', 'hunter2']", f"['run', '--token', '{HIDDEN}']"),
        ("redis://:p@ss@host/0", f"redis://:{HIDDEN}@host/0"),
        ("https://0123456789abcdef0123@host/", f"https://{HIDDEN}@host/"),
        ("password=(not shown)ab, at x", f"password={HIDDEN}, at x"),
        ("Authorization: Bearer (not shown)", f"Authorization: Bearer {HIDDEN}"),
        ("AccountKey=abc/d==;x=1", f"AccountKey={HIDDEN};x=1"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
            f"-----BEGIN RSA PRIVATE KEY-----{HIDDEN}-----END RSA PRIVATE KEY-----",
        ),
    ],
)
def test_secrets_go_and_what_is_around_them_stays(text: str, left: str) -> None:
    assert redacted(text) == left


ISSUED = (
    *("sk-", "sk_", "rk-", "rk_", "hf_", "github_pat_", "glpat-", "npm_", "dckr_pat_"),
    *(f"gh{kind}_" for kind in "oprsu"),
    *(f"xox{kind}-" for kind in "abeprs"),
    *("AKIA", "ASIA", "AIza"),
)
NAMED = (
    *("api_key", "api-key", "apikey", "secret", "passwd", "password", "passphrase"),
    *(f"{kind}_token" for kind in ("access", "auth", "refresh", "session", "security", "bearer")),
    *("bottoken", "bot-token"),
    *(f"{kind}_key" for kind in ("access", "account", "encryption", "private", "shared")),
    *("signing-key", "storagekey"),
)
QUERIED = (
    *(f"{by}{what}" for by in ("", "x-amz-", "x-goog-") for what in ("credential", "signature")),
    *("security-token", "x-amz-security-token", "auth", "code", "key", "pwd", "sig", "token"),
)
WRITTEN = (
    *(f"{prefix}{{value}}" for prefix in ISSUED),
    "eyJ0eXAiOiJ.{value}.c2ln",
    *(f"{name}={{value}}" for name in NAMED),
    *(f"see ?{name}={{value}}" for name in QUERIED),
    *(f"--{name} {{value}}" for name in ("token", "password", "hub-token", "db-passphrase")),
    *(f"SOME_{end}: {{value}}" for end in ("AUTH", "KEY", "PASS", "PAT", "PWD", "TOKEN")),
    *(f"authorization: {way}{{value}}" for way in ("", "apikey ", "basic ", "digest ", "token ")),
    *(f"('{name}', '{{value}}')" for name in ("cookie", "x-token", "proxy-authorization")),
    *(f"{way} {{value}}" for way in ("Bearer", "basic")),
    *("hf_token={value}", "token: {value}", "my-token: {value}", "Set-Cookie: a={value}; b"),
    *("https://u:{value}@h/", "https://{value}@h/"),
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{value}\n-----END OPENSSH PRIVATE KEY-----",
)


@pytest.mark.parametrize("written", WRITTEN)
def test_every_way_to_write_a_secret_is_known_by_itself(written: str) -> None:
    """Nothing else in the text is suspect, and the value alone is not, either."""
    value = "0A1B2C3D4E5F6G7H8I9J0K1L2M3N4O5P"
    assert redacted(value) == value
    assert value not in redacted(f"it said {written.format(value=value)} and went")


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 64 of 128 at step 3, sampled_tokens=12, token_batch_size=4096",
        "unexpected token: '}'; invalid token: identifier; token: 151645; token=151645",
        "KeyError: 'reward'; key: train.batch_size; valid keys: name, base_url, api_key_var",
        "api_key_var: RATCHET_REFERENCE_KEY; RATCHET_REFERENCE_KEY: is not set",
        "unknown keys: 'password', 'user'",
        "password: must be set; no API key: set one; api_key=None",
        "hf_hub_download failed in sk-learn",
        "a basic understanding; Basic authentication is not offered",
        "eos_token=<|im_end|>, eos_token: </s>, pad_token='<pad>', PAD_TOKEN = 1",
        "tcp://host:5000 and http://127.0.0.1:8000/v1/x@y and git@host",
        "Send `Authorization: Bearer KEY`",
        "the weight gate failed: 0.31 against 0.1 at version 12 of engine-0",
        "sha256 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
        'write api_key = { env_var = "RATCHET_JUDGE_KEY" }',
        '"token": {"env_var": "HF_TOKEN"}, "password": {\'env_var\': \'PW\'}',
    ],
)
def test_ordinary_texts_stay(text: str) -> None:
    assert redacted(text) == text


def test_what_the_project_says_of_itself_stays() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/*.md"), *ROOT.glob("configs/**/*.toml")]
    assert len(files) > 10
    for file in files:
        for line in file.read_text().splitlines():
            assert redacted(line, 10**6) == line, file


@pytest.mark.parametrize(
    "written",
    [
        "{name}={value}",
        "{name}: {value}",
        "at {name} = {value}, line 3",
        '{{"{name}": "{value} {value}"}}',
        "{{'{name}': '{value}', 'a': 1}}",
        "curl -H 'Authorization: Bearer {value}' x",
        "postgresql://{name}:{value}@db:5432/x",
        "https://bucket/o?X-Amz-Signature={value}&a=1",
        "https://bucket/o?a=1&key={value}#x",
    ],
)
@given(
    name=st.sampled_from(
        [
            "OPENAI_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "MY_SECRET_KEY",
            "WANDB_API_KEY",
            "HF_TOKEN",
            "GITHUB_PAT",
            "DB_PASSWORD",
            "password",
            "client_secret",
            "accessToken",
            "x-api-key",
            "refresh_token",
        ]
    ),
    # What no one would say of a key: with a digit in it.
    value=st.tuples(
        st.text(LETTERS, min_size=4), st.integers(10, 99), st.text(LETTERS, min_size=4)
    ).map(lambda parts: "".join(map(str, parts))),
    before=st.text(max_size=40).filter(lambda text: '"' not in text and "'" not in text),
)
def test_no_named_secret_is_left(written: str, name: str, value: str, before: str) -> None:
    text = f"{before} " + written.format(name=name, value=quote(value))
    assert value not in redacted(text, 10**6)


@given(
    st.text(max_size=200) | st.text("=: \"'\\\n,;&?@/-_.<[tokenkeysecretpassbearer0A", max_size=200)
)
def test_twice_is_once_and_any_text_will_do(text: str) -> None:
    once = redacted(text, 10**6)
    assert redacted(once, 10**6) == once
    assert len(redacted(text, 10)) <= 10


def test_no_text_takes_long() -> None:
    for part in (
        *("a", "secret", "_token", "://", "--", "password=", "key", "(b'", "A_", "token=", "a-"),
        *(
            '\\"',
            "basic ",
            "sk-",
            "eyJaaaaaaaaa.",
            "-----BEGIN PRIVATE KEY-----",
            "&sig=",
            "Cookie:",
        ),
    ):
        began = time.process_time()
        redacted(part * (50_000 // len(part)))
        assert time.process_time() - began < 2.0, part


def test_data_is_redacted_wherever_a_text_is() -> None:
    result = {"a": ["HF_TOKEN: x", 1, None], "b": {"c": "password=x", "d": 0.5}}
    assert redacted_all(result) == {
        "a": [f"HF_TOKEN: {HIDDEN}", 1, None],
        "b": {"c": f"password={HIDDEN}", "d": 0.5},
    }


def test_a_log_holds_no_secret_also_in_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = logging.getLogger(), io.StringIO()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", out)
    root.handlers[:] = []
    try:
        log_without_secrets(logging.INFO, "%(levelname)s %(message)s")
        logging.getLogger("a.library").info("asks %s", "https://me:hunter2@h/")
        try:
            raise ValueError("password=hunter2")
        except ValueError:
            logging.getLogger("ours").exception("failed")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    said = out.getvalue()
    assert said.startswith(f"INFO asks https://me:{HIDDEN}@h/\nERROR failed\nTraceback")
    assert f"ValueError: password={HIDDEN}" in said and "hunter2" not in said


def test_no_process_sets_its_log_up_in_another_way() -> None:
    """The audit log is JSON, of names and ids alone."""
    ways = re.compile(r"logging\.(?:basicConfig|Formatter|StreamHandler|FileHandler)\(|dictConfig")
    rooms = ("activities", "api", "configs", "docker", "worker", "workflows")
    files = [file for room in rooms for file in ROOT.glob(f"{room}/**/*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if ways.search(file.read_text())}
    assert found == {
        "activities/contracts/redact.py",
        "activities/envs/server.py",
        "api/__main__.py",
    }


def test_a_text_without_end_is_cut_and_takes_no_longer() -> None:
    text = writable("password=hunter2 " * 10**6)
    assert len(text) <= LONGEST and "hunter2" not in text


@pytest.mark.parametrize("lines", [2_000, 20_000])
def test_a_long_traceback_keeps_its_beginning_and_the_error_it_ends_with(lines: int) -> None:
    frame = '  File "x.py", line 1\n'
    last = "RuntimeError: password=hunter2"
    text = writable(f"Traceback:\n{frame * lines}{last}")
    assert len(text) <= LONGEST and "…" in text
    assert text.startswith("Traceback:\n") and text.endswith(f"\nRuntimeError: password={HIDDEN}")


def test_a_text_that_only_secrets_make_long_is_kept_whole() -> None:
    text = "password=hunter2hunter2\n" * 1000
    assert len(text) > LONGEST
    assert writable(text) == f"password={HIDDEN}\n" * 1000


def test_the_end_of_a_text_begins_in_no_secret() -> None:
    for size in range(50, 85):
        text = f"{'x' * 300}\npassword={'hunter2' * 9}\r{'y' * size}\nlast words"
        end = redacted_end(text, 20)
        assert end == f"{'y' * 9}\nlast words"
        assert "hunter2" not in redacted_end(text, 40) and "hunter2" not in redacted_end(text, 30)
    # A mark may be longer than what it hides: the newest characters stay.
    assert redacted_end("key=1; password=1\n" * 4 + "last words", 90).endswith("\nlast words")
    assert redacted_end("hunter2" * 99, 20) == "", "perhaps all of it is a secret"
