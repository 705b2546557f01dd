"""A custom tracker that also sends files: pictures and tables that records announce. Tests copy it into a project."""

import base64
from contextlib import suppress

from my_project.posts import Posts, PostsTracker

from hydraloop.tracking import RefusedError


class FilesTracker(PostsTracker):
    def send(self, records):
        super().send(records)
        due = self.memory.setdefault("due", [])
        due.extend([file.name, file.path] for r in records for file in r.objects)

    def send_file(self):
        due = self.memory.get("due")
        if not due:
            return False
        name, path = due[0]
        with suppress(RefusedError, FileNotFoundError):  # skip such a file
            content = (self.run.run_dir / path).read_bytes()
            self.post(event="file", name=name, content=base64.b64encode(content).decode())
        due.pop(0)
        return True


class PostsWithFiles(Posts):
    kind = "my_project.posts_files.FilesTracker"
