"""Hosts for scripts that try clusters: network namespaces of this machine, each with a cable to one switch.

Imported by scripts, not run. Needs root and ip (iproute2).
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import datetime

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PORT = 7070


def glinthawk():
    """The binary: GLINTHAWK names it, by default it is the one built here."""
    path = os.environ.get("GLINTHAWK") or os.path.join(HERE, "target/release/glinthawk")
    if not os.access(path, os.X_OK):
        sys.exit(f"no binary at {path}: run cargo build --release, or set GLINTHAWK")
    return os.path.abspath(path)


def requests(count, words, tokens):
    """Lines of a job: prompts that share no beginning, of about `words` words, that generate `tokens` (a range)."""
    for line in range(1, count + 1):
        text = " ".join(str(line * 7919 + word * 104729)[:5] for word in range(words + line % 7))
        yield {"custom_id": f"line-{line}", "prompt": f"{text} is", "ignore_eos": True,
               "max_tokens": tokens[line * 37 % len(tokens)], "temperature": 0.7 if line % 2 else 0, "seed": line}


def write_job(path, lines):
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def results(path):
    """All result lines of an output, sorted, without the only thing that may differ: the time of creation."""
    with open(path, "rb") as file:
        return sorted(re.sub(rb'"created":\d+', b'"created":0', line) for line in file)


class Hosts:
    """So many hosts, the first at 10.77.0.1. Everything on them ends with the `with` block."""

    def __init__(self, count):
        if os.geteuid() != 0 or not shutil.which("ip"):
            sys.exit("network namespaces are made by root, with ip (iproute2)")
        self.count = count
        self.children = []
        self.environment = {**os.environ, "GLINTHAWK_TOKEN": secrets.token_hex(16)}

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        self.folder = tempfile.mkdtemp(prefix="glinthawk-")
        self.made = []
        try:
            switch = self.space("switch")
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for host in range(self.count):
                space, port = self.space(host), f"host{host}"
                ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "uplink", "netns", space)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "uplink")
                ip("-n", space, "link", "set", "uplink", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def space(self, name):
        """Makes a namespace."""
        space = self.name(name)
        ip("netns", "add", space)
        self.made.append(space)
        ip("-n", space, "link", "set", "lo", "up")
        return space

    def __exit__(self, *_):
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()
        for space in self.made:
            subprocess.run(["ip", "netns", "delete", space], check=False)
        subprocess.run(["umount", "--quiet", self.path("disk")], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def name(self, host):
        return f"glinthawk-{os.getpid()}-{host}"

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, host, command, log):
        """A process on a host. What it says is added to a file."""
        with open(self.path(log), "ab") as file:
            child = subprocess.Popen(["ip", "netns", "exec", self.name(host), *command], stdin=subprocess.DEVNULL,
                                     stdout=file, stderr=file, env=self.environment)
        self.children.append(child)
        return child

    def worker(self, host, *options):
        """A worker for the dispatcher of host 0, on one core. It waits for dispatchers as long as it takes."""
        cores = sorted(os.sched_getaffinity(0))
        command = [glinthawk(), "worker", "--join", f"{self.address(0)}:{PORT}", "--stay", "--device", "cpu",
                   "--threads", "1", "--cores", str(cores[host % len(cores)]), *options]
        return self.start(host, command, f"worker-{host}.log")

    def dispatcher(self, log, *options):
        """`glinthawk run` with workers from other hosts, on host 0."""
        return self.start(0, [glinthawk(), "run", *options, "--listen", f"{self.address(0)}:{PORT}"], log)

    def cut(self, host):
        """Pulls a host's cable: nobody is told."""
        ip("-n", self.name("switch"), "link", "set", f"host{host}", "down")

    def mend(self, host):
        ip("-n", self.name("switch"), "link", "set", f"host{host}", "up")

    def part(self, one, other):
        """Two hosts no longer reach each other; both reach all others."""
        for here, there in [(one, other), (other, one)]:
            ip("-n", self.name(here), "route", "add", "blackhole", f"{self.address(there)}/32")

    def reunite(self, one, other):
        for here, there in [(one, other), (other, one)]:
            ip("-n", self.name(here), "route", "del", "blackhole", f"{self.address(there)}/32")

    def read(self, name):
        try:
            with open(self.path(name), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def role(self, host):
        """What a worker was told to be since it last dialled."""
        found = re.search(r"joined as ([\w-]+)", self.read(f"worker-{host}.log").rpartition("dialling")[2])
        return found[1] if found else "spare"


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def logged(text, pattern):
    """Lines of a log that match: seconds since the epoch, and the match."""
    for line in text.splitlines():
        when, found = re.match(r"(\S+)Z ", line), re.search(pattern, line)
        if when and found:
            yield datetime.fromisoformat(when[1] + "+00:00").timestamp(), found
