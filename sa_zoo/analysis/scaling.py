"""The plot of a benchmark: time and memory of one layer against the number of tokens, log-log."""

from pathlib import Path

from matplotlib.figure import Figure

from sa_zoo.analysis.benchmark import Growth


def plot_growth(rows: list[Growth], path: Path) -> None:
    """Draw time and memory of a layer against its tokens into a PNG file."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for network in dict.fromkeys(row.network for row in rows):
        own = [row for row in rows if row.network == network]
        tokens = [row.side**2 for row in own]
        milliseconds = [row.microseconds * row.side**2 / 1e3 for row in own]
        time.plot(tokens, milliseconds, marker="o", label=network)
        memory.plot(tokens, [row.bytes * row.side**2 / 2**20 for row in own], marker="o", label=network)
    time.set(title="time of one layer, one image", ylabel="ms")
    memory.set(title="memory beside the weights", ylabel="MiB")
    sides = sorted({row.side for row in rows})
    for axes in (time, memory):
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_xticks([side**2 for side in sides], [f"{side}²" for side in sides])
        axes.minorticks_off()
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
