"""Checks that ISA-specific objects define no symbol that portable code could end up calling.

A weak symbol (an inline function or a template instance) of a file compiled with -mavx512f may be
the copy that the linker keeps for the whole library, and then an older CPU meets an illegal
instruction. Usage: check_isa_symbols.py BUILD_DIR
"""

import re
import subprocess
import sys
from pathlib import Path

# The object library of a level, or a single source that is compiled for one.
LEVEL = "(avx2|avx512|avx512bf16|amx)"
ISA_OBJECT = re.compile(rf"/effinfer_{LEVEL}\.dir/|_{LEVEL}\.cpp\.o$")
WEAK = re.compile(r"^[0-9a-f]+ [WVu] (.*)$")


def weak_symbols(path: Path) -> list[str]:
    command = ["nm", "-C", "--defined-only", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [match.group(1) for line in listing.splitlines() if (match := WEAK.match(line))]


def main() -> None:
    objects = [path for path in Path(sys.argv[1]).rglob("*.o") if ISA_OBJECT.search(str(path))]
    if not objects:
        sys.exit(f"no ISA objects under {sys.argv[1]}")
    bad = [f"{path.name}: {symbol}" for path in objects for symbol in weak_symbols(path)]
    print("\n".join(bad) if bad else f"isa symbols: {len(objects)} objects define no weak symbol")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
