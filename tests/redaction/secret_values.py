"""Strategies: secrets by form, their positions in text, and ordinary values."""

from __future__ import annotations

import base64
import string

from hypothesis import strategies as st

ALNUM = string.ascii_letters + string.digits
LOWER = string.ascii_lowercase + string.digits


def random(alphabet: str, length: int) -> st.SearchStrategy[str]:
    """Return texts of a length with a digit, a lower-case and an upper-case letter, if the alphabet has them."""
    kinds = [string.digits, string.ascii_lowercase, string.ascii_uppercase]
    needed = [kind for kind in kinds if set(kind) & set(alphabet)]

    def mixed(text: str) -> bool:
        return all(set(kind) & set(text) for kind in needed)

    return st.text(alphabet, min_size=length, max_size=length).filter(mixed)


def _basic(secret: str) -> str:
    return "Basic " + base64.b64encode(f"user:{secret}".encode()).decode()


TOKENS = {
    "openai": random(ALNUM, 40).map(lambda t: f"sk-proj-{t}"),
    "short key": random(ALNUM, 24).map(lambda t: f"sk-{t}"),
    "hugging face": random(ALNUM, 34).map(lambda t: f"hf_{t}"),
    "github": random(ALNUM, 36).map(lambda t: f"ghp_{t}"),
    "github fine": random(ALNUM, 60).map(lambda t: f"github_pat_{t[:22]}_{t[22:]}"),
    "gitlab": random(ALNUM, 20).map(lambda t: f"glpat-{t}"),
    "slack": random(ALNUM, 24).map(lambda t: f"xoxb-1234567890-{t}"),
    "aws": random(string.ascii_uppercase + "234567", 16).map(lambda t: f"AKIA{t}"),
    "aws temporary": random(string.ascii_uppercase + "234567", 16).map(lambda t: f"ASIA{t}"),
    "google": random(ALNUM + "-_", 35).map(lambda t: f"AIza{t}"),
    "jwt": random(ALNUM, 60).map(lambda t: f"eyJ{t[:20]}.eyJ{t[20:40]}.{t[40:]}"),
    "pem": random(ALNUM, 64).map(lambda t: f"-----BEGIN RSA PRIVATE KEY-----\n{t}\n-----END RSA PRIVATE KEY-----"),
    "bearer": random(ALNUM, 24).map(lambda t: f"Bearer {t}"),
    "basic": random(ALNUM, 12).map(_basic),
    "url token": random(ALNUM, 20).map(lambda t: f"https://{t}@git.example.com/me/model"),
    "url password": random(ALNUM + "/", 16).map(lambda t: f"https://me:x{t}@example.com:8443/v1"),
    "dsn": random(ALNUM + "/", 16).map(lambda t: f"postgresql+psycopg2://me:x{t}@db.example.com:5432/mlflow"),
    "bare userinfo": random(ALNUM + "/", 14).map(lambda t: f"admin:x{t}@db.example.com:5432"),
    "query token": random(ALNUM, 16).map(lambda t: f"https://example.com/mcp?v=1&token={t}"),
    "query key": random(ALNUM, 16).map(lambda t: f"https://example.com/v1?key={t}"),
    "query sig": random(ALNUM + "%", 30).map(lambda t: f"https://a.blob.example.net/c?sv=2024-01-01&sig={t}"),
    "presigned": random(LOWER, 64).map(
        lambda t: f"https://b.s3.example.com/m.tar?X-Amz-Expires=60&X-Amz-Signature={t}"
    ),
    "account key": random(ALNUM + "+/", 60).map(lambda t: f"AccountName=x;AccountKey={t}==;EndpointSuffix=y"),
    "sql server": random(ALNUM, 12).map(lambda t: f"Server=db;User Id=sa;Password={t};Encrypt=yes"),
    "shell": random(ALNUM, 12).map(lambda t: f"export HF_TOKEN={t} && ./setup.sh"),
    "option": random(ALNUM, 12).map(lambda t: f"serve --api-key {t} --port 80"),
    "json": random(ALNUM, 12).map(lambda t: f'{{"client_secret": "{t}", "n": 1}}'),
    "header": random(ALNUM, 16).map(lambda t: f"X-Api-Key: {t}"),
    "webhook": random(ALNUM, 24).map(lambda t: f"https://hooks.slack.com/services/T01/B02/{t}"),
}
"""Texts with a secret, by form."""

AROUND = st.sampled_from(["{}", "see {}", "{}, then go on", "({})", "'{}'", '"{}"', "a\n{}\nb", "x={}"])
"""Text around a secret."""

words = st.text(string.ascii_lowercase, min_size=1, max_size=10)
HEX = string.digits + "abcdef"
ORDINARY = st.one_of(
    st.text(HEX, min_size=64, max_size=64),
    st.text(HEX, min_size=40, max_size=40).map(lambda t: f"commit {t}"),
    st.text(HEX, min_size=64, max_size=64).map(lambda t: f"sha256:{t}"),
    st.uuids().map(str),
    st.lists(words, min_size=1, max_size=12).map(" ".join),
    st.lists(words, min_size=2, max_size=4).map("/".join),
    st.lists(words, min_size=2, max_size=4).map(lambda t: "/home/me/" + "/".join(t)),
    st.tuples(words, words).map(lambda t: f"{t[0]}/{t[1]}-7B-Instruct-v0.2"),
    st.tuples(words, words).map(lambda t: f"{t[0]}.{t[1]}@example.com"),
    st.tuples(words, words).map(lambda t: f"Write to {t[0]}@{t[1]}.org about the password of your token."),
    st.tuples(words, st.integers(1, 65535)).map(lambda t: f"http://{t[0]}.example.com:{t[1]}/v1"),
    st.tuples(words, words).map(lambda t: f"https://{t[0]}.com/{t[1]}@v1?page=2&sort=key"),
    words.map(lambda t: f"git@github.com:me/{t}.git"),
    words.map(lambda t: f"ssh://git@host.org:22/{t}.git"),
    words.map(lambda t: f"git+https://github.com/me/{t}@v1.0"),
    words.map(lambda t: f"postgresql://me@db.example.com:5432/{t}"),
    words.map(lambda t: f"sqlite:////tmp/{t}/mlflow.db"),
    words.map(lambda t: f"s3://bucket/{t}@2"),
    words.map(lambda t: f"Ask for the password, the token or the API key, then {t}."),
    words.map(lambda t: f"components.rewards.{t}.Tokens"),
    words.map(lambda t: f"<|{t}_token|>"),
    words.map(lambda t: rf"(?P<key>{t})=\w+|password=(\S+)"),
    words.map(lambda t: f"task-{t}-based-on-sk-learn-pipelines"),
    words.map(lambda t: f"https://user:${{PASSWORD}}@{t}.org"),
    words.map(lambda t: f"export HF_TOKEN=$HF_TOKEN && pip install {t}"),
    words.map(lambda t: f"env:{t.upper()}_TOKEN"),
    st.datetimes().map(str),
    st.integers().map(str),
    st.floats(allow_nan=False).map(str),
)
"""Values that occur in configurations and are no secrets."""

SECRET_KEYS = st.sampled_from(
    ["api_key", "OPENAI_KEY", "hf_token", "password", "Authorization", "X-Api-Key", "client_secret", "pat", "dsn",
     "db_pass", "accessToken"]
)  # fmt: skip
ORDINARY_KEYS = st.sampled_from(
    ["name", "path", "max_tokens", "eos_token", "url", "system", "stage_key", "pattern", "revision", "note"]
)
