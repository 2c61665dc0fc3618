"""The step pipeline: what one step will run, its buffers, and the ring that keeps the device's queues full."""
