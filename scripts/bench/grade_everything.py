"""Does every repaired task of the shipped data earn the reward, and does every broken task fail to?

Grades each instance of the training and held-out sets twice, with its broken code and with its repair, using
the real sandboxes and a time limit of 60 s. Exits with 1 if a repair fails or a broken instance passes.

    python scripts/bench/grade_everything.py --json OUT [--threads 4]
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

from rlpipe.config.env import SandboxConfig  # noqa: E402
from rlpipe.envs.sandbox.local import TreeRunner  # noqa: E402
from tests.helpers.shipped_tasks import SETS, graded_both, shipped  # noqa: E402


def main() -> int:
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--threads", type=int, default=4)
    given, load = parser.parse_args(), load_average()
    runner, started, result = TreeRunner(SandboxConfig()), time.monotonic(), {}
    for name in SETS:
        instances = shipped(name)
        with ThreadPoolExecutor(given.threads) as threads:
            passed = list(threads.map(lambda instance: graded_both(runner, instance), instances))
        table = list(zip(instances, passed, strict=True))
        result[name] = {
            "instances": len(instances),
            "repaired that pass": sum(after == len(i.tests) for i, (_, after) in table),
            "broken that fail": sum(before < len(i.tests) for i, (before, _) in table),
            "wrong": [i.instance_id for i, (b, a) in table if not b < len(i.tests) == a],
        }
        print(name, result[name], flush=True)
    wrong = sum(len(one["wrong"]) for one in result.values())
    about = provenance(given, load, packages=())
    document = about | {"seconds": round(time.monotonic() - started), "wrong": wrong, "sets": result}
    write_result(given.json, document)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
