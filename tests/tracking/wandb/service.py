"""A stand-in for W&B's service: the answers that its library needs to open a run, continue it and log.

It was made from the library's requests, not from the real service. It shows what arrives, not that W&B accepts it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0" * 40
"""A key that W&B's library accepts as an API key."""
_WHERE = {"id": "p", "name": "p", "entity": {"id": "e", "name": "team"}}


class Service:
    """Stores histories by run id, and names of artifacts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rows: dict[str, dict[int, Any]] = {}
        self.exits: dict[str, int] = {}
        self.summaries: dict[str, dict[str, Any]] = {}
        self.artifacts: list[dict[str, Any]] = []
        """Name, type and aliases of each artifact."""

    def steps(self) -> dict[str, list[int]]:
        """Return the steps of each run's history."""
        return {run: [row["_step"] for _, row in sorted(rows.items())] for run, rows in self.rows.items()}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to one request."""
        if path.endswith("file_stream"):
            run = path.split("/")[-2]
            history: Any = (body.get("files") or {}).get("wandb-history.jsonl")
            for place, line in enumerate(history["content"] if history else []):
                self.rows.setdefault(run, {})[history["offset"] + place] = json.loads(line)
            summary: Any = (body.get("files") or {}).get("wandb-summary.json")
            for line in summary["content"] if summary else []:
                self.summaries[run] = json.loads(line)
            if body.get("complete"):
                self.exits[run] = body["exitcode"]
            return {}
        query, given = body.get("query", ""), body.get("variables") or {}
        if "upsertBucket" in query:
            bucket = {"id": "i", "name": given.get("name"), "config": "{}", "project": _WHERE, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "rtifact" in query:
            return {"data": self._artifact(query, given)}
        if "createRunFiles" in query:
            return {"data": {"createRunFiles": {"runID": "i", "uploadHeaders": [], "files": []}}}
        if "historyTail" in query:
            return {"data": {"model": {**_WHERE, "bucket": self._bucket(given["name"])}}}
        return {"data": {"viewer": {"id": "v", "username": "u", "entity": "team", "flags": "{}"}}}

    def _artifact(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer the requests that store an artifact without its files, in their order."""
        asked = given.get("input") or {}
        place: dict[str, Any] = {"uploadUrl": f"{self.url}/upload", "uploadHeaders": []}
        if "createArtifact(" in query:
            aliases = sorted(one["alias"] for one in asked["aliases"])
            name = asked["artifactCollectionName"]
            self.artifacts.append({"name": name, "type": asked["artifactTypeName"], "aliases": aliases})
            found = {
                "id": f"{len(self.artifacts) - 1}",
                "state": "PENDING",
                "artifactSequence": {"latestArtifact": None},
            }
            return {"createArtifact": {"artifact": found}}
        if "createArtifactManifest(" in query:
            return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": {"id": "f", **place}}}}
        if "createArtifactFiles(" in query:
            place |= {"uploadMultipartUrls": None}
            files = [
                {"displayName": one["name"], "storagePath": one["name"], "artifact": {"id": one["artifactID"]}, **place}
                for one in asked["artifactFiles"]
            ]
            return {"createArtifactFiles": {"files": {"edges": [{"node": file} for file in files]}}}
        if "commitArtifact(" in query:
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "d"}}}
        return {"project": None}

    def _bucket(self, run: str) -> dict[str, Any] | None:
        rows = self.rows.get(run)
        if not rows:
            return None
        last = json.dumps(rows[max(rows)])
        return {
            "id": "i", "name": run, "summaryMetrics": last, "displayName": "n", "logLineCount": 0,
            "historyLineCount": len(rows), "eventsLineCount": 0, "historyTail": json.dumps([last]), "eventsTail": "[]",
            "config": "{}", "tags": [], "wandbConfig": '{"t": {"3": [1]}}',
        }  # fmt: skip


@contextmanager
def serving(port: int = 0) -> Iterator[Service]:
    """Start a service on this machine, by default on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content) if self.command == "POST" and content.startswith(b"{") else {}
            answer = json.dumps(service.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815  # http.server's names

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: Any) -> None:
            """Print nothing if a client is killed, as tests do on purpose."""

    server = Server(("127.0.0.1", port), Handler)
    service = Service(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
