from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.files import config_yaml, console, run_directory
from hydraloop.files import secrets as masking
from hydraloop.files.result import Result, ResultFile
from hydraloop.files.secrets import (
    looks_secret,
    mask_command,
    mask_overrides,
    mask_text,
    masked,
    remember,
    remember_overrides,
)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", ())


SECRETS = """
    token hf_token HF_TOKEN hfToken api_token github_token wandb_token auth_token bearer_token refresh_token accessToken
    password passwords passwd dbPassword db_password secret secrets client_secret MY_SECRET credential credentials
    AWS_SECRET_ACCESS_KEY apikey apiKey APIKey api_key api_keys API_KEY_2 access_key private_key secret_key x-api-key
    --api-key WANDB_API_KEY hooks.mine.api_key hydra.job.env_set.HF_TOKEN +hooks@mine.token
    bearer cookie cookies sessionCookie jwt JWT session_id sessionId webhook slack_webhook webhook_url auth basic_auth
    bot_token slack_token SLACK_BOT_TOKEN gitlabToken deploy_token session_token telegram.bot_token private_token
    pwd db_pwd dbPwd DB_PWD passphrase ssh_passphrase dsn SENTRY_DSN connection_string connectionString conn_str
    account_key AccountKey ssh_key wandb_key encryption_key webhook_uri
"""
NO_SECRETS = """
    gt_key key my_key keys sort_key primary_key image_key public_key key_dim query_key_value attention_token
    prompt_token pad_token eos_token mask_token next_token num_tokens tokens token_count token_embedding
    token_type tokenizer tokenizer.pad_token pad_token_id password_strength password_strength.min secret_santa_rate
    api_key_file private_key_path secret_name passwordless keyboard monkey donkey AWS_ACCESS_KEY_ID
    PWD forward_pass bypass credentials_file lr optimizer.lr _target_ 0 ... seed
    author authors co_author path data.path patterns pattern patience patch pats_count session session_ids_file id
    start_token bos_token image_token classToken user_token OLDPWD env_set.PWD pwd_length passphrase_file dsn_pool
    connection connection_timeout ssh_key_file account_key_id connection_strength bot_token_count
    pat github_pat glob_pat
    run_id webhook_timeout url auth_method cookiecutter bearer_count spatial authored jwt_algorithm
"""


def test_a_name_is_that_of_a_secret_by_the_words_at_its_end() -> None:
    assert [name for name in SECRETS.split() if not looks_secret(name)] == []
    assert [name for name in NO_SECRETS.split() if looks_secret(name)] == []
    assert not looks_secret("")


ORDINARY: dict[str, Any] = {
    "gt_key": "masks",
    "model": {"attention_token": "cls", "prompt_token": "<image>", "token_embedding": {"init": "normal"}},
    "tokenizer": {"pad_token": "<pad>", "eos_token": "</s>", "num_tokens": 5, "kind": "bpe"},
    "task": {"start_token": "<|reserved_special_token_0|>", "end_token": "end-of-the-text", "class_token": "a" * 20},
    "transform": {"key": "image", "keys": ["image", "label"], "sort_key": "name", "primary_key": "id"},
    "password_strength": {"_target_": "m.Strength", "minimum": "good", "words": ["password", "secret"]},
    "secret_santa_rate": "high",
    "embedding": {"token": {"init": "learnable", "size": 5}},
    "format": "{key}: loss={loss} token={token} token=%s",
    "prompt": "the password: a word; token: another",
    "columns": ["label:int", "token:string"],
    "url": "http://localhost:8080/x",
    "glob_pat": "*.png",
}


def test_a_config_without_secrets_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("A_TOKEN", "true"), ("A_SECRET", "1"), ("A_PASSWORD", "password"), ("SORT_KEY", "learnable")):
        monkeypatch.setenv(name, value)
    remember(ORDINARY)
    assert masked(ORDINARY) == ORDINARY
    remember({"embedding": {"token": "learnable"}})  # masked in its place; the word is not searched for elsewhere
    assert masked(ORDINARY) == ORDINARY


def test_a_config_keeps_its_structure() -> None:
    config: dict[str, Any] = {
        "hooks": {
            "mine": {"_target_": "m.Hook", "api_key": "abc", "token": 5, "password": None, "secret": True},
            "other": {"token": "${oc.env:TOKEN}", "api_key": "${oc.env:KEY,null}", "secret": "???", "password": ""},
            "third": {"url": "https://me:abc@host/x?n=1"},
        },
        "credentials": {"_target_": "m.Login", "_password": "x", "user": "me", "port": 80, "more": [{"a": "b"}, "c"]},
        "api_keys": ["a", 1, "b"],
        "lines": ["+a.api_key=abc", "+a.api_key=b c", "key=abc", "two words", "note of api_key=abc"],
        3: "x",
    }
    before = repr(config)
    assert masked(config) == {
        "hooks": {
            "mine": {"_target_": "m.Hook", "api_key": "***", "token": 5, "password": None, "secret": True},
            "other": {"token": "${oc.env:TOKEN}", "api_key": "${oc.env:KEY,null}", "secret": "???", "password": ""},
            "third": {"url": "https://me:***@host/x?n=1"},
        },
        "credentials": {
            "_target_": "m.Login",
            "_password": "***",
            "user": "***",
            "port": "***",
            "more": [{"a": "***"}, "***"],
        },
        "api_keys": ["***", "***", "***"],
        "lines": ["+a.api_key=***", "+a.api_key=***", "key=abc", "two words", "note of api_key=abc"],
        3: "x",
    }
    assert repr(config) == before
    assert masked(masked(config)) == masked(config)
    assert masked(None) is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+hooks.mine.api_key=a,b", "+hooks.mine.api_key=***"),
        ("password='a b'", "password=***"),
        ("+mine={password:a,n:3}", "+mine={password:***,n:3}"),
        ("+mine={n: 3, password: a}", "+mine={n: 3, password: ***}"),
        ("+mine=[b,{token:a}]", "+mine=[b,{token:***}]"),
        ("+mine.api_key=99887766", "+mine.api_key=***"),
        ("password=-1.5e3", "password=***"),
        ("+mine={password: 5, token: 5}", "+mine={password: ***, token: 5}"),
        ("+mine.url=redis://:pw@host", "+mine.url=redis://:***@host"),
        ("+mine.my_token=glx-0123456789abcdef", "+mine.my_token=***"),
        ("+mine.my_token='glx-0123456789abcdef',glx-0123456789abcdef", "+mine.my_token=***"),
        ("+mine={my_token: glx-0123456789abcdef}", "+mine={my_token: ***}"),
        ("+mine={login: {api_key: 'a, b', n: 1}}", "+mine={login: {api_key: ***, n: 1}}"),
        ("+mine={api_key: ${oc.env:X}, glob_pat: '*.png'}", "+mine={api_key: ${oc.env:X}, glob_pat: '*.png'}"),
        *((same, same) for same in ("task.start_token=<s>", "task.start_token=[UNK12345678901234]")),
        *((same, same) for same in ("token=5", "api_key=null", "+a.token=${oc.env:X}", "hooks=[ema]", "~hooks.ema")),
        *((same, same) for same in ("optimizer.lr=1e-3", "++hooks.mine.key=a", "a.greater_keys=[accuracy]", "x=")),
    ],
)
def test_overrides(override: str, expected: str) -> None:
    assert mask_overrides([override]) == [expected]


def test_a_command_line() -> None:
    typed = [
        "train.py",
        "--api-key",
        "abc",
        "--token",
        "--verbose",
        "on",
        "a.password=b c",
        "--secret=x",
        "n=two words",
    ]
    expected = "train.py --api-key *** --token --verbose on 'a.password=***' '--secret=***' 'n=two words'"
    assert mask_command(typed) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/x", "https://me:***@host/x"),
        ("https://me:p@w@host/x", "https://me:***@host/x"),
        ("cannot reach redis://:pw@host!", "cannot reach redis://:***@host!"),
        *(
            (same, same)
            for same in (
                "",
                "epoch 1/3  iter 10/60  lr 1.0e-03  eta 0:00:04  loss 0.1234",
                "token=abc, password: short",
                'f"https://{user}:{password}@host"',
                "http://localhost:8080/x",
                "hf_abcdefghijklmnopqrstuvwxyz0123456789",
            )
        ),
    ],
)
def test_in_text_passwords_of_urls_are_masked_and_nothing_else_by_its_shape(text: str, expected: str) -> None:
    assert mask_text(text) == expected
    assert mask_text(expected) == expected


def test_the_environments_secrets_are_found_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_TOKEN", "a/b c'd\"e")
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("MY_KEY", "A035C8C19219BA821ECE")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "x9x9x9x9")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    assert mask_text("at a/b c'd\"e!") == "at ***!"
    assert mask_text("at a%2Fb%20c%27d%22e!") == "at ***!"  # in a URL
    assert mask_text("at a/b c'd\\\"e!") == "at ***!"  # in JSON
    assert mask_text("at a/b c\\'d\"e!") == "at ***!"  # in Python
    same = f"1234567 A035C8C19219BA821ECE {tmp_path} {Path.cwd()}"
    assert mask_text(f"{same} x9x9x9x9") == f"{same} ***"
    assert masked({"a": "a/b c'd\"e", "b": ["a/b c'd\"e"]}) == {"a": "***", "b": ["***"]}


def test_variables_that_are_set_during_the_run_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's hook may log in and set one."""
    text = "first-value second-value"
    assert mask_text(text) == text
    os.environ["LATE_TOKEN"] = "first-value"
    assert mask_text(text) == "*** second-value"
    os.environ["LATE_TOKEN"] = "second-value"
    assert mask_text(text) == "first-value ***"
    del os.environ["LATE_TOKEN"]
    assert mask_text(text) == text


def test_remembered_secrets_are_found_anywhere() -> None:
    remember({"a": {"api_key": "hunter2hunter2"}, "url": "ab://me:in-a-url@host", "b": {"tokens": ["some-thing"]}})
    remember({"sort_key": "filename", "key": "some words", "token": "short", "password": "password", "n": 3})
    remember({"secrets": [{"x": "in-a-list"}]})
    remember_overrides(["+hooks.mine.api_key='an override'", "--api-key=an-argument", "seed=123456789", "words"])
    same = "filename some words some-thing short password 123456789"
    assert (
        mask_text(f"{same} hunter2hunter2 in-a-url in-a-list|an override|an-argument") == f"{same} *** *** ***|***|***"
    )


def test_numbers_are_secrets_too_but_a_token_may_be_an_id() -> None:
    config = {
        "w": {"password": 87654321, "secret": 1.25, "api_keys": [7, True, None], "token": 5, "num_tokens": 9},
        "credentials": {"pin": 1234, "token": 5, "_depth": 2},
        "access_token": [11223344, "abc"],
    }
    assert masked(config) == {
        "w": {"password": "***", "secret": "***", "api_keys": ["***", True, None], "token": 5, "num_tokens": 9},
        "credentials": {"pin": "***", "token": "***", "_depth": 2},
        "access_token": [11223344, "***"],
    }
    remember(config)
    remember_overrides(["+hooks.w.api_key=99887766", "+hooks.w.token=55667788"])
    same = "1.25 7 1234 5 11223344 55667788"
    assert mask_text(f"{same} 87654321 99887766") == f"{same} *** ***"


def test_an_ordinary_word_is_masked_at_its_own_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"secret": "accuracy", "url": "ab://me:learnable@host", "password": "abcdefghijklmno"}
    remember(config)
    remember_overrides(["+hooks.w.api_key=validation", "token=learnable"])
    text = "best accuracy 0.1061, validation learnable abcdefghijklmno"
    assert mask_text(text) == text
    assert masked(config) == {"secret": "***", "url": "ab://me:***@host", "password": "***"}
    assert mask_overrides(["+hooks.w.api_key=validation"]) == ["+hooks.w.api_key=***"]
    remember({"token": "abcdefghijklmnop"})  # 16 letters are no word
    assert mask_text("abcdefghijklmnop") == "***"
    monkeypatch.setenv("MY_PASSWORD", "accuracy")  # of an environment variable: searched for
    assert mask_text("best accuracy") == "best ***"


def test_secrets_remembered_in_several_threads_are_all_known() -> None:
    found = [f"kQ81sdf7Zp{number:03}" for number in range(200)]
    threads = [threading.Thread(target=remember, args=({"token": value},)) for value in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mask_text(" ".join(found)) == " ".join(["***"] * 200)


def test_the_longest_is_masked_first() -> None:
    remember({"password": "abcdefg1"})
    remember({"token": "abcdefg1-more"})
    assert mask_text("abcdefg1-more abcdefg1") == "*** ***"


@pytest.mark.parametrize(
    "text",
    [
        "+a={" + "a" * 200_000,
        "+a={" + "a." * 100_000,
        "+a={" + "token: a " * 22_000,
        "+a={" + "token:" * 33_000,
        "+a={" + "token: '" + "\\" * 200_000,
        "+a={" + "token" + " " * 200_000,
        "+a={" + "token: 'x token: \"y " * 12_000,
        "http://" * 28_000,
        "ab://c:d" * 25_000,
        "ab://a:" + "@" * 200_000,
    ],
    ids=lambda text: re.sub(r"\s", "_", text[:12]),
)
def test_a_text_that_tempts_a_pattern_to_go_back_again_and_again(text: str) -> None:
    """What is quadratic takes minutes for this, and the suite does not end."""
    assert len(mask_overrides([text])[0]) > 0


def test_a_config_as_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE", "abc")
    cfg = OmegaConf.create({"token": "${oc.env:ELSEWHERE}", "size": 1, "m": "${size}"})
    assert config_yaml.masked_yaml(cfg, resolve=True) == "token: '***'\nsize: 1\nm: 1\n"
    assert config_yaml.masked_yaml(cfg, resolve=False) == "token: ${oc.env:ELSEWHERE}\nsize: 1\nm: ${size}\n"
    with pytest.raises(UserError, match="m: an interpolation does not resolve"):
        config_yaml.masked_yaml(OmegaConf.create({"m": "${x}"}), resolve=True)


def test_a_config_that_does_not_resolve_is_remembered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE", "in-the-environment")
    config_yaml.remember_config(OmegaConf.create({"token": "${oc.env:ELSEWHERE}"}))
    config_yaml.remember_config(OmegaConf.create({"token": "typed-here", "x": "${no.such}"}))
    assert mask_text("in-the-environment typed-here") == "*** ***"


def test_a_run_from_python_records_its_config_masked(tmp_path: Path) -> None:
    run_directory.record_config(OmegaConf.create({"token": "abc", "x": "${token}"}), tmp_path / ".hydra")
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "token: '***'\nx: ${token}\n"


def test_result_json_has_no_secret(tmp_path: Path) -> None:
    remember({"token": "hunter2hunter2"})
    file = ResultFile(tmp_path)
    Result(status="failed", error="no hunter2hunter2", reason="ab://me:abc@host").write(tmp_path)
    text = (tmp_path / "result.json").read_text()
    assert '"error": "no ***"' in text
    assert '"reason": "ab://me:***@host"' in text
    file.set_error(ValueError("again hunter2hunter2"))
    assert '"error": "ValueError: again ***"' in (tmp_path / "result.json").read_text()


def test_log_messages_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remember({"api_key": "hunter2hunter2"})
    root = logging.getLogger()
    before = [*root.handlers]
    root.handlers = []
    try:
        console.set_up(False, tmp_path / "train.log")
        try:
            raise ValueError("of hunter2hunter2")
        except ValueError:
            root.exception("with %s", "hunter2hunter2")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
    for text in (capsys.readouterr().err, (tmp_path / "train.log").read_text()):
        assert "hunter2" not in text
        assert "with ***" in text
        assert "ValueError: of ***" in text


def test_it_needs_no_torch() -> None:
    code = "import sys, hydraloop.files.config_yaml; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
