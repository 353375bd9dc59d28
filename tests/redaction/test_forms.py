"""Secrets in text are recognised by their form; ordinary text is not; the time is linear."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.redaction import MASK, mask_text, secret_variable
from components.redaction.forms import spans
from tests.redaction.secret_values import AROUND, ORDINARY, TOKENS

pytestmark = [
    pytest.mark.security,
    pytest.mark.filterwarnings("ignore:Do not use the `random` module"),  # other threads of the process do
]
few = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("form", TOKENS)
@few
@given(data=st.data())
def test_a_secret_of_each_form_is_recognised_in_any_text(form, data):
    text = data.draw(AROUND).format(data.draw(TOKENS[form]))
    masked = mask_text(text)
    assert MASK in masked
    assert not spans(masked)


@settings(max_examples=300, deadline=None)
@given(ORDINARY)
def test_ordinary_text_stays_as_it_is(text):
    assert mask_text(text) == text


@few
@given(st.text(max_size=300))
def test_masking_is_idempotent(text):
    once = mask_text(text)
    assert mask_text(once) == once


def test_only_the_secret_is_masked():
    cases = {
        "postgresql://u:pa/ss@h/db": "postgresql://u:***@h/db",
        "https://s3cret@h/v1 and http://h:80/x@y": "https://***@h/v1 and http://h:80/x@y",
        "https://h/?a=1&token=abc&b=2": "https://h/?a=1&token=***&b=2",
        "Server=x;Password=abc;Encrypt=yes": "Server=x;Password=***;Encrypt=yes",
        "+judge.api_key=abc": "+judge.api_key=***",
        "a={b: {api_key: abc, n: 3}}": "a={b: {api_key: ***, n: 3}}",
        "Authorization: Bearer abc12345": "Authorization: Bearer ***",
        "redis://:hunter2@h:6379/0": "redis://:***@h:6379/0",
        "curl -u me:hunter2 https://h": "curl -u me:*** https://h",
        "reward.model.key_variable=OPENAI_API_KEY": "reward.model.key_variable=OPENAI_API_KEY",
        "Set OPENAI_API_KEY, or pass api_key=None.": "Set OPENAI_API_KEY, or pass api_key=None.",
        'api_key=os.environ["OPENAI_API_KEY"]': 'api_key=os.environ["OPENAI_API_KEY"]',
        'server --api-key "$KEY"': 'server --api-key "$KEY"',
        "contact:joe@h.com, Basic ideas, Bearer of news": "contact:joe@h.com, Basic ideas, Bearer of news",
    }  # fmt: skip
    assert {text: mask_text(text) for text in cases} == cases


def test_values_of_secret_variables_are_masked_anywhere(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_KEY", "zq81kd02mfp")
    monkeypatch.setenv("SOME_PASSWORD", "password")  # an ordinary word: masking it would tell more than it hides
    assert mask_text("the server says: zq81kd02mfp is not valid") == "the server says: *** is not valid"
    assert mask_text("ask for the password") == "ask for the password"


def test_the_value_of_a_variable_that_was_read_as_a_secret_is_masked_whatever_its_name(monkeypatch):
    monkeypatch.setenv("GATEWAY_ENTRY", "hunter-blue-lake")
    assert mask_text("enter by hunter-blue-lake") == "enter by hunter-blue-lake"
    assert secret_variable("GATEWAY_ENTRY") == "hunter-blue-lake"
    assert mask_text("enter by hunter-blue-lake") == "enter by ***"


WORST = {
    "schemes": "://",
    "urls": "https://a:b/",
    "at": "a:b1@",
    "colons": "a:",
    "assignments": "password=",
    "quotes": 'password="',
    "escaped quotes": 'password=\\"',
    "braces": "{password:",
    "names": "passwordpasswordpassword",
    "dashes": "--api-key ",
    "jwt": "eyJaaaaaaaa.",
    "sk": "sk-",
    "pem": "-----BEGIN RSA PRIVATE KEY-----",
    "pem beginnings": "-----BEGIN ",
    "bearer": "Bearer ",
    "curl": "-u a",
    "words": "a",
    "spaces": " ",
    "newlines": "password =\n",
    "queries": "?key=&key",
    "hyphens": "a-",
    "dots": "a.",
}  # fmt: skip


def seconds(text: str) -> float:
    """Return the processor time of masking a text, the lower of two."""
    tries = []
    for _ in range(2):
        start = time.process_time()
        mask_text(text)
        tries.append(time.process_time() - start)
    return min(tries)


def test_the_time_is_linear(subtests):
    for name, piece in WORST.items():
        with subtests.test(name):
            seconds(piece)
            small, large = (seconds(piece * (length // len(piece))) for length in (12_500, 100_000))
            assert large < 8 * 4 * max(small, 0.005), f"{small:.4f} s for 12.5 kB, {large:.4f} s for 100 kB"


def test_odd_passwords_in_urls_are_masked(subtests):
    for url in [
        "postgres://u:/S3cr3tpw9@h/db",
        "https://u:/S3cr3t@h/x",
        "postgres://u:(S3cr3t@h/db",
        "redis://u:$A-S3cr3t@h:1/0",
    ]:
        with subtests.test(url=url):
            assert "S3cr3t" not in mask_text(url)


def test_tokens_of_further_services_are_recognised(subtests):
    for prefix in ["lsv2_pt_", "tvly-", "rpa_", "csk-", "pcsk_", "whsec_", "shpat_", "glsa_", "NRAK-"]:
        with subtests.test(prefix=prefix):
            assert MASK in mask_text(f"use {prefix}9f8e7d6c5b4a39281706 here")
