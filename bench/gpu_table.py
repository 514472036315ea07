"""The table of a run of gpu.py, as text."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

# What makes two rows the same case, by section.
KEYS = {
    "matmul": ("dtype", "rows", "cols", "n"),
    "prefill": ("rows", "cols", "n"),  # all types beside cuBLASLt's bfloat16
    "ternary": ("rows", "cols", "n"),
    "attention": ("batch", "context", "group", "rows"),
    "prompts": ("batch", "context", "group", "density"),
    "norms": ("op", "rows", "cols"),
    "sampling": ("op", "rows", "cols"),
    "model": ("op", "type", "layers"),
    "step": ("op", "type", "layers"),
}


def case_of(row: Row) -> tuple[Any, ...]:
    return (row["section"], *(row.get(key) for key in KEYS.get(row["section"], ())))


def label(row: Row) -> str:
    if row["section"] in ("matmul", "prefill", "ternary"):
        return f"{row['dtype']} {row['rows']}x{row['cols']} n={row['n']}"
    if row["section"] == "attention":
        return f"batch {row['batch']} kv {row['context']} group {row['group']} rows {row['rows']}"
    if row["section"] in ("model", "step"):
        return f"{row['op']}, {row['layers']} layers of {row['cols']}, {row['type']}"
    if row["section"] == "prompts":
        return f"{row['context']} tokens group {row['group']} density {row['density']:g}"
    return f"{row['op']} {row['rows']}x{row['cols']}"


def copy_bandwidth(rows: list[Row]) -> float | None:
    """Bytes per second, read and written."""
    for row in rows:
        if row["section"] == "copy":
            return float(row["bytes"] / row["median_us"]) * 1e6
    return None


def bf16_rate(peers: list[Row]) -> float | None:
    for row in peers:
        if row["section"] == "ceiling":
            return float(row["flops"] / row["median_us"]) * 1e6
    return None


def ceilings(result: dict[str, Any]) -> list[str]:
    copy, rate = copy_bandwidth(result["rows"]), bf16_rate(result["peers"])
    lines = ["copy: not measured" if copy is None else f"copy: {copy / 1e12:.2f} TB/s"]
    lines.append(
        "bf16 products: not measured, no PyTorch with CUDA"
        if rate is None
        else f"bf16 products: {rate / 1e12:.0f} TFLOP/s (torch.matmul)"
    )
    return lines


def tests_line(result: dict[str, Any]) -> str:
    tests: dict[str, int] = result.get("tests", {})
    if not tests:
        return "device tests: not run"
    bad = [name for name, status in tests.items() if status not in (0, 77)]
    passed = sum(status == 0 for status in tests.values())
    return f"device tests: {passed} of {len(tests)} programs passed" + (
        f", FAILED: {', '.join(bad)}" if bad else ""
    )


def columns(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def share(rate: float, copy: float | None) -> str:
    return "?" if copy is None else f"{100 * rate / copy:.0f} %"


def section_lines(name: str, result: dict[str, Any]) -> list[str]:
    rows = [row for row in result["rows"] if row["section"] == name]
    if not rows:
        return [f"{name}: not measured"]
    copy = copy_bandwidth(result["rows"])
    peers: dict[tuple[Any, ...], list[Row]] = {}
    for peer in result["peers"]:
        peers.setdefault(case_of(peer), []).append(peer)
    lines: list[tuple[str, ...]] = [(name, "us", "GB/s", "of copy", "TFLOP/s", "peers (us, x)")]
    for row in rows:
        seconds = row["median_us"] * 1e-6
        rate = row["bytes"] / seconds
        beside = [
            f"{peer['peer']} {peer['median_us']:.1f}, {peer['median_us'] / row['median_us']:.2f}x"
            for peer in peers.get(case_of(row), [])
        ]
        lines.append(
            (
                label(row),
                f"{row['median_us']:.1f}",
                f"{rate / 1e9:.0f}" if row["bytes"] else "",
                share(rate, copy) if row["bytes"] else "",
                f"{row['flops'] / seconds / 1e12:.1f}" if row["flops"] else "",
                "; ".join(beside),
            )
        )
    return columns(lines)


def table(result: dict[str, Any]) -> str:
    device = result["device"]
    lines = [
        f"{device['name']} (driver: {result['driver']}), effinfer {result['commit']}",
        *ceilings(result),
        tests_line(result),
        f"compute-sanitizer: {result.get('sanitizer', 'not run')}",
    ]
    lines += [f"note: {note}" for note in result["notes"]]
    for name in KEYS:
        lines += ["", *section_lines(name, result)]
    lines += ["", *(f"FAILED: {what}" for what in result["failed"])]
    return "\n".join(lines).rstrip()
