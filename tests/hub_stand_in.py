"""
A Hub of this machine's own: an HTTP server with the few addresses of the Hugging Face Hub that pushing and loading ask for.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

TOKEN = "hf_of_the_tests"
USER = "me"


class Hub:
    """
    The repositories, and what goes wrong.

    :ivar repositories: commits of each, the newest last; a commit is a number of 40 digits and files by name
    :ivar asked: method and path of each request
    :ivar forbidden: the token may not write
    :ivar gated: nobody may read
    :ivar breaks_off: the connection ends in the middle of a file of this name, or (``"commit"``) of the answer to a commit
    """

    def __init__(self):
        self.repositories, self.asked, self.breaks_off = {}, [], None
        self.forbidden = self.gated = False

    def files(self, repo_id):
        return self.repositories[repo_id][-1][1]

    def put(self, repo_id, **files):
        """Change files as someone else would; ``None`` removes one, and ``__`` stands for a dot."""
        changes = {name.replace("__", "."): content for name, content in files.items()}
        self.commit(repo_id, {**(self.files(repo_id) if repo_id in self.repositories else {}), **changes})

    def commit(self, repo_id, files):
        kept = {name: content for name, content in files.items() if content is not None}
        commits = self.repositories.setdefault(repo_id, [])
        digest = hashlib.sha1(json.dumps([len(commits), repo_id]).encode()).hexdigest()
        commits.append((digest, kept))
        return digest


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    @property
    def hub(self):
        return self.server.hub

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code=""):
        self.answer({"error": code}, status, **({"X_Error_Code": code} if code else {}))

    def may_write(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401)
            return False
        if self.hub.forbidden and "whoami" not in self.path:
            self.refuse(403)
            return False
        return True

    def do_POST(self):
        body = (
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "Content-Length" in self.headers
            else self.chunks()
        )
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(("POST", path))
        if path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif not self.may_write():
            return
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
            exists = repo_id in self.hub.repositories
            if not exists:
                self.hub.commit(repo_id, {".gitattributes": b""})
            self.answer({"url": f"{self.server.address}/{repo_id}", "name": repo_id}, 409 if exists else 200)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self.commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self.refuse(404)

    def chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def commit(self, repo_id, lines):
        if self.hub.breaks_off == "commit":
            self.connection.close()
            self.close_connection = True
            return
        files = dict(self.hub.files(repo_id))
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        number = self.hub.commit(repo_id, files)
        self.answer({"commitUrl": f"{self.server.address}/{repo_id}/commit/{number}", "commitOid": number})

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if path == "/api/whoami-v2":
            if self.may_write():
                self.answer({"type": "user", "name": USER, "orgs": []})
            return
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path)
        wanted = found and (found[1], found[3] or "main")
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo_id, revision = wanted or (file[1], file[2]) if wanted or file else ("", "")
        if repo_id not in self.hub.repositories:
            self.refuse(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
            return
        if self.hub.gated:
            self.refuse(403, "GatedRepo")
            return
        commits = self.hub.repositories[repo_id]
        at = [commit for commit in commits if revision in (commit[0], "main")]
        if not at:
            self.refuse(404, "RevisionNotFound")
            return
        number, files = at[-1]
        if found and found[2] == "tree":
            self.answer([{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files])
        elif found:
            self.answer({"id": repo_id, "sha": number, "tags": [], "siblings": [{"rfilename": name} for name in files]})
        elif file[3] not in files:
            self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=number)
        else:
            self.send(file[3], files[file[3]], number)

    do_HEAD = do_GET

    def send(self, name, content, number):
        headers = {"X_Repo_Commit": number, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if self.command == "GET" and self.hub.breaks_off == name:
            headers["Content_Length"] = len(content)
            content = content[: len(content) // 2]
            self.close_connection = True
        self.answer(content, **headers)


@contextlib.contextmanager
def stand_in(monkeypatch, folder):
    """Have huggingface_hub talk to a Hub of its own, with a cache of its own, and with a token."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.hub, server.address = Hub(), f"http://127.0.0.1:{server.server_port}"
    server.daemon_threads = True
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(folder / "stored_tokens"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")
    huggingface_hub.close_session()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with stand_in(monkeypatch, tmp_path) as found:
        yield found
