"""Device queues behind one small interface: CUDA streams, worker threads on a CPU, and a seeded simulator."""
