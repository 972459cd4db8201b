"""Train the built-in shapes for a few epochs from Python, and read the result.

Two processes on the CPU: `run(..., device="cpu", num_processes=2)`. Four GPUs: `run(..., device="0,1,2,3")`.
"""

from accel_yolo import run

if __name__ == "__main__":
    # Options have the names of the flags. Without `data` the demo set is trained by its own recipe.
    result = run(epochs=3, name="from_python", noplots=True)
    print("best weights:", result.best)
    for name, value in result.metrics.items():
        print(f"{name:24} {value:.4f}")
