"""Which tests `tools/sanitize` runs where it is to take a share of them: all that have no parameters, and of each suite
with parameters every SHARE-th instance, others with another TURN. tools/sanitize takes the turn of the commit.

    ctest --test-dir build/asan -N | tools/sanitize_share.py SHARE TURN FILE

Writes FILE for `ctest -I FILE`, and says what is left out."""

import re
import sys
from collections import Counter
from pathlib import Path


def chosen(listed: str, share: int, turn: int) -> tuple[list[int], int]:
    """Their numbers, and how many there are. `listed`: what `ctest -N` prints."""
    numbers, total = [], 0
    seen: Counter[str] = Counter()
    for number, name in re.findall(r"^\s*Test\s+#(\d+): (\S+)", listed, re.MULTILINE):
        total += 1
        suite = name.rpartition("/")[0]
        if not suite:
            numbers.append(int(number))
            continue
        if (seen[suite] + turn) % share == 0:
            numbers.append(int(number))
        seen[suite] += 1
    return numbers, total


def main() -> int:
    share, turn, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    numbers, total = chosen(sys.stdin.read(), share, turn)
    if not numbers:
        print("sanitize: no test is in the list", file=sys.stderr)
        return 1
    file.write_text(",".join(map(str, [numbers[0], numbers[0], 1, *numbers])) + "\n")
    print(
        f"left out, {total - len(numbers)} of {total} tests: of suites with parameters one instance in {share} runs, "
        "others with another commit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
