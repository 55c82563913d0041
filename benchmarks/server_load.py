"""A server under clients that come, go and misbehave: what they got, how long it took, and whether anything grew.

    python benchmarks/server_load.py --minutes 10 --clients 16
    python benchmarks/server_load.py --minutes 1 --speech DIR --text DIR     # other models than those of the package

Starts `mlx_cosyh3 serve` on a free port of this machine, and ends it with SIGTERM. Every client is a thread that picks
one deed after the other: ask well, ask wrongly, hang up in the middle, send half of a request. Exit status 1 if an
answer was not the one that was asked for, if something is left at work, or if memory, descriptors or threads grew.
"""

import argparse
import http.client
import io
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict

import numpy as np
import soundfile

SERVE = """
import sys
from mlx_cosyh3 import cli
from mlx_cosyh3.server import cli as serve
parser = cli.Parser()
serve.add_arguments(parser)
serve.run(parser.parse_args(sys.argv[1:]))
"""
TEXTS = ("Good morning.", "It is nine.", "The train is late again, I fear.", "Yes.", "One two three four five.")
JSON = "application/json"
GROWTH, MORE = 0.03, 8  # of memory; descriptors or threads: from the second third of the time to the last


class Load:
    def __init__(self, port, token, seconds, clones):
        self.port, self.token, self.clones = port, token, clones
        self.end = time.monotonic() + seconds
        self.lock, self.times, self.wrong, self.statuses = threading.Lock(), defaultdict(list), [], Counter()
        out = io.BytesIO()
        soundfile.write(out, 0.1 * np.random.default_rng(0).standard_normal(32000), 16000, format="WAV")
        self.recording = out.getvalue()
        self.deeds = [self.speak, self.speak, self.stream, self.complete, self.complete, self.completion_events,
                      self.look,
                      self.wrong_field, self.wrong_voice, self.no_token, self.not_json, self.too_large, self.hang_up,
                      self.hang_up_streaming, self.half_a_request, self.bad_upload, self.foreign_page]  # fmt: skip
        if clones:
            self.deeds.append(self.clone)

    # One request

    def ask(self, method, path, body=None, kind=JSON, read=True, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind} | headers
        connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
        if not read:
            return connection
        try:
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def expect(self, answer, status, begins=b""):
        got, data = answer
        # A full queue is an answer that a client must be ready for.
        if got not in (status, 429) or got == status and not data.startswith(begins) or not data:
            raise AssertionError(f"status {got} for {status}: {data[:200]!r}")
        if got >= 400:
            assert "message" in json.loads(data)["error"]
        with self.lock:
            self.statuses[got] += 1

    # Deeds

    def speak(self, rng):
        kind, magic = rng.choice(
            [("wav", b"RIFF"), ("flac", b"fLaC"), ("opus", b"OggS"), ("mp3", b"\xff"), ("pcm", b"")]
        )
        body = {"input": rng.choice(TEXTS), "response_format": kind, "speed": rng.choice([1, 1.5])}
        self.expect(self.ask("POST", "/v1/audio/speech", body), 200, magic)

    def stream(self, rng):
        body = {"input": rng.choice(TEXTS), "response_format": "wav", "stream": True}
        self.expect(self.ask("POST", "/v1/audio/speech", body), 200, b"RIFF")

    def complete(self, rng):
        body = {"prompt": rng.choice(TEXTS), "max_tokens": rng.randint(1, 40), "n": rng.randint(1, 3)}
        self.expect(self.ask("POST", "/v1/completions", body), 200, b"{")

    def completion_events(self, rng):
        body = {"prompt": rng.choice(TEXTS), "max_tokens": 20, "stream": True}
        answer = self.ask("POST", "/v1/completions", body)
        self.expect(answer, 200, b"data: ")
        assert answer[0] == 429 or answer[1].endswith(b"data: [DONE]\n\n"), answer[1][-100:]

    def look(self, rng):
        path = rng.choice(["/v1/models", "/v1/voices", "/health", "/metrics", "/"])
        self.expect(self.ask("GET", path), 200)

    def wrong_field(self, rng):
        self.expect(self.ask("POST", "/v1/audio/speech", {"inptu": "x"}), 400)

    def wrong_voice(self, rng):
        self.expect(self.ask("POST", "/v1/audio/speech", {"input": "x", "voice": "nobody"}), 400)

    def no_token(self, rng):
        self.expect(self.ask("POST", "/v1/completions", {"prompt": "x"}, Authorization="Bearer wrong"), 401)

    def not_json(self, rng):
        self.expect(self.ask("POST", "/v1/completions", rng.randbytes(100)), 400)

    def too_large(self, rng):
        self.expect(self.ask("POST", "/v1/audio/speech", {"input": "x" * 300_000}), 413)

    def foreign_page(self, rng):
        self.expect(self.ask("POST", "/v1/audio/speech", {"input": "x"}, Origin="https://evil.example"), 403)

    def hang_up(self, rng):
        connection = self.ask("POST", "/v1/audio/speech", {"input": rng.choice(TEXTS)}, read=False)
        time.sleep(rng.random())
        connection.close()

    def hang_up_streaming(self, rng):
        body = {"input": " ".join(TEXTS), "response_format": "pcm", "stream": True}
        connection = self.ask("POST", "/v1/audio/speech", body, read=False)
        connection.getresponse().read(100)
        connection.close()

    def half_a_request(self, rng):
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{" + rng.randbytes(
                50
            )
            sock.sendall(whole[: rng.randrange(len(whole))])
            time.sleep(0.2 * rng.random())

    def bad_upload(self, rng):
        answer = self.upload(rng.choice([b"", b"RIFF" + rng.randbytes(200), rng.randbytes(500)]))
        self.expect(answer, 400)

    def clone(self, rng):
        status, data = answer = self.upload(self.recording)
        if status == 409:  # others have made the most there may be
            return
        self.expect(answer, 201)
        if status == 201:
            voice = json.loads(data)["id"]
            self.expect(
                self.ask("POST", "/v1/audio/speech", {"input": "Yes.", "voice": voice, "response_format": "wav"}),
                200,
                b"RIFF",
            )
            self.expect(self.ask("DELETE", f"/v1/voices/{voice}"), 200)

    def upload(self, data):
        head = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="../../x"\r\n\r\n'
        return self.ask("POST", "/v1/voices", head + data + b"\r\n--xyz--\r\n", "multipart/form-data; boundary=xyz")

    # All of it

    def client(self, seed):
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            deed, begin = rng.choice(self.deeds), time.monotonic()
            try:
                deed(rng)
            except Exception as e:  # whatever went wrong is what is looked for
                with self.lock:
                    self.wrong.append(f"{deed.__name__}: {type(e).__name__}: {e}")
            with self.lock:
                self.times[deed.__name__].append(time.monotonic() - begin)

    def metrics(self):
        text = self.ask("GET", "/metrics")[1].decode()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--speech", default="cosyvoice3-tiny", help="model that speaks")
    parser.add_argument("--text", default="h3-tiny", help="model that continues text")
    parser.add_argument(
        "--clones", action="store_true", help="the speaking model can take recordings: let clients make voices"
    )
    args = parser.parse_args()
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "--port", "0", "--model", f"speech={args.speech}",
         "--model", f"text={args.text}"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"MLX_COSYH3_TOKEN": token},
    )  # fmt: skip
    try:
        line = process.stderr.readline()
        found = re.search(r"listening at http://\S+:(\d+)", line)
        if not found:
            sys.exit(line + process.stderr.read())
        load = Load(int(found[1]), token, 60 * args.minutes, args.clones)
        load.speak(random.Random(0)), load.complete(random.Random(0))  # the models are loaded
        ok = run(load, args.clients, process.pid)
        process.send_signal(signal.SIGTERM)
        status, said = process.wait(90), process.stderr.read().strip()
        print(f"SIGTERM: exit status {status}, {len(said.splitlines())} lines on stderr")
        if said:
            print(said[:2000])
        sys.exit(0 if ok and status == 0 and not said else 1)
    finally:
        process.kill()


def run(load, clients, pid):
    threads = [threading.Thread(target=load.client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    begin, seen = time.monotonic(), []
    while any(t.is_alive() for t in threads):
        time.sleep(2)
        now = load.metrics()
        alive = len(os.listdir(f"/proc/{pid}/task")) if os.path.isdir(f"/proc/{pid}/task") else 0
        seen.append((time.monotonic() - begin, now.get("mlx_cosyh3_resident_bytes", 0),
                     now.get("mlx_cosyh3_open_files", 0), alive))  # fmt: skip
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    quiet = time.monotonic() + 30  # what was left behind ends at its next step
    while (last := load.metrics())["mlx_cosyh3_active"] and time.monotonic() < quiet:
        time.sleep(0.2)

    asked = sum(map(len, load.times.values()))
    print(f"{clients} clients, {seconds:.0f} s: {asked} deeds, {asked / seconds:.1f} a second")
    for name, times in sorted(load.times.items()):
        high = sorted(times)[int(0.95 * (len(times) - 1))]
        print(f"  {name:18} {len(times):6}   median {statistics.median(times):6.3f} s   95 % within {high:6.3f} s")
    print("answers by status:", dict(sorted(load.statuses.items())))
    left = {k: v for k, v in last.items() if k.startswith(("mlx_cosyh3_active", "mlx_cosyh3_scheduler")) and v}
    failed = {k: v for k, v in last.items() if re.search(r'status="5|state="failed"', k) and v}
    print("cancelled:", sum(v for k, v in last.items() if 'state="cancelled"' in k), "left at work:", left or "none")
    print("failed in the server:", failed or "none")
    early, late = seen[len(seen) // 3 : 2 * len(seen) // 3] or seen, seen[-max(1, len(seen) // 3) :]
    # Of memory the median: its peaks are those of the work that happened to come together.
    held = [(statistics.median(row[1] for row in rows), max(row[2] for row in rows), max(row[3] for row in rows))
            for rows in (early, late)]  # fmt: skip
    print(f"second third -> last third: {held[0][0] / 1e6:.0f} -> {held[1][0] / 1e6:.0f} MB resident (median), "
          f"{held[0][1]:.0f} -> {held[1][1]:.0f} descriptors, {held[0][2]} -> {held[1][2]} threads (most)")  # fmt: skip
    for name, i, unit in (("resident MB", 0, 1e6), ("descriptors", 1, 1), ("threads", 2, 1)):
        print(f"most {name}, minute by minute:", " ".join(
            f"{max(row[i] for at, *row in seen if at // 60 == minute) / unit:.0f}"
            for minute in sorted({at // 60 for at, *_ in seen})))  # fmt: skip
    for line in load.wrong[:20]:
        print("WRONG", line)
    bounds = {"memory": held[0][0] * (1 + GROWTH), "descriptors": held[0][1] + MORE, "threads": held[0][2] + MORE}
    grown = [name for (name, bound), now in zip(bounds.items(), held[1]) if now > bound]
    for name in grown:
        print(f"{name} grew")
    return not (load.wrong or left or failed or grown)


if __name__ == "__main__":
    main()
