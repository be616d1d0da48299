"""A scorer for `rl.reward=http://127.0.0.1:PORT/`, in Python's standard library: sums of two digits, as before.

    python examples/reinforce/scorer.py PORT
"""

import http.server
import json
import sys

from addition import reward


class Scorer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = json.dumps({"rewards": list(map(reward, asked["answers"], asked["records"]))}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Scorer)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
