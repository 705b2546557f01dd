"""Slurm with accounting, as most clusters have it: slurmdbd and a private MariaDB, from Debian's packages."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.processes import until
from tests.slurm.cluster import Slurm, free_ports
from tests.slurm.packages import unpacked

_PACKAGES = (
    *("slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core"),
    *("libmariadb3", "libaio1", "liburing2", "libpcre2-8-0"),
)
_CONF = """AuthType=auth/none
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={ports[0]}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
PluginDir={root}/usr/lib/x86_64-linux-gnu/slurm-wlm
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports[1]}
StorageUser=root
"""


class SlurmWithAccounting(Slurm):
    """A cluster whose `sacct` answers. For arguments see `Slurm`."""

    def __init__(self, folder: Path, nodes: Sequence[str] = ("n1", "n2"), lines: Sequence[str] = ()) -> None:
        self._root, ports = unpacked("slurm-accounting", _PACKAGES), free_ports(2)
        own = ("AccountingStorageHost=127.0.0.1", f"AccountingStoragePort={ports[0]}")
        super().__init__(folder, nodes, [*lines, "AccountingStorageType=accounting_storage/slurmdbd", *own], self._root)
        text = _CONF.format(host=socket.gethostname(), ports=ports, folder=folder, root=self._root)
        (folder / "slurmdbd.conf").write_text(text)
        (folder / "slurmdbd.conf").chmod(0o600)
        self._port = ports[1]
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the database, slurmdbd and the cluster, see `Slurm`."""
        if not self._servers:
            data = self.folder / "mariadb"
            data.mkdir()
            places = (f"--basedir={self._root}/usr", f"--datadir={data}", "--socket=socket", f"--port={self._port}")
            who = ("--user=root", "--skip-grant-tables", "--bind-address=127.0.0.1")
            self._servers.append(self._started("mariadbd", "--no-defaults", *places, *who))
            until(lambda: _listens(self._port), f"MariaDB does not start, see {self.folder}/started.log")
            self._servers.append(self._started("slurmdbd", "-D"))
            until(self._knows_the_cluster, f"slurmdbd does not start, see {self.folder}/slurmdbd.log")
        super().start()

    def _knows_the_cluster(self) -> bool:
        with suppress(AssertionError):
            return bool(self.run("sacctmgr", "--immediate", "add", "cluster", "hydraloop"))
        return False

    def stop(self) -> None:
        """Kill all that belongs to the cluster."""
        super().stop()
        for server in reversed(self._servers):
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
