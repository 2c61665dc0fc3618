#!/bin/sh
# Everything that benchmarks/results/h200 holds of the 8B shape. From the repository's root:
# sh benchmarks/measure_gpu.sh FOLDER [HALF], HALF being 1, 2 or nothing for both.
# First the longest decode, the start and mixed steps, alone, since they hang on a host that is on time. Then the rest,
# with two GPUs side by side, else one after the other. Each part has a limit of its own and a log.
out=$1
half=${2:-12}
mkdir -p "$out/raw"
raw=$out/raw
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cli="python3 -c 'from gapless.cli.main import main; main()'"
shape="--model llama-3.1-8b --load-format dummy"

part() { # NAME LIMIT_S COMMAND
    echo "$(date +%T) $1 begins"
    timeout "$2" sh -c "$3" > "$raw/$1.log" 2>&1
    echo "$(date +%T) $1 ended with $?"
    tail -n 4 "$raw/$1.log" | cut -c 1-300
}

alone() { # what hangs on the host being on time: nothing else runs beside it
    part decode_32x8192 260 "$cli bench decode $shape --depth 1 2 --requests 32 --prompt-tokens 256 --new-tokens 8192 \
        --repeats 1 --json $raw/decode_32x8192.json --picture $raw/decode_32x8192.png --timelines $raw"
    part startup 80 "python3 benchmarks/startup.py $shape --cold --repeat 2 --out $raw/startup.json"
    part mixed_step 50 "python3 benchmarks/kernels/mixed_step.py --json $raw/mixed_step.json"
    part mixed_traffic 120 "python3 benchmarks/mixed_traffic.py --out $raw/mixed_traffic.json"
}

ours() {
    part throughput_256x1024 120 "$cli bench throughput $shape --depth 2 --requests 256 --prompt-tokens 1024 \
        --new-tokens 1024 --spread 0 --repeats 1 --json $raw/throughput_256x1024.json --timelines $raw"
    part single_1x1024 70 "$cli bench decode $shape --depth 2 --requests 1 --prompt-tokens 256 --new-tokens 1024 \
        --repeats 2 --json $raw/single_1x1024.json --timelines $raw"
    part growth 100 "$cli bench growth $shape --budget 4 --json $raw/growth.json"
}

beside_ours() {
    part peer_decode_32x8192 170 "python3 benchmarks/peers/compare.py --engines transformers-async --new-tokens 8192 \
        --timeout-s 165 --out $raw/peer_decode_32x8192.json"
    part prefill_step 70 "python3 benchmarks/kernels/prefill_step.py --profile --json $raw/prefill_step.json"
}

costs() {
    part http 140 "python3 benchmarks/server/http_overhead.py $shape --device cuda --streams 256 --prompt-tokens 1024 \
        --new-tokens 1024 --rounds 1 --out $raw/http_overhead.json"
    part gpu_sampling 100 "python3 benchmarks/gpu_sampling.py --preset llama-3.1-8b --rows 256 --prompt 1024 \
        --out $raw/gpu_sampling.json"
    part recorder_overhead 80 "python3 benchmarks/recorder_overhead.py --preset llama-3.1-8b --device cuda --requests 32 \
        --prompt 256 --new-tokens 512 --rounds 4 --depth 2 --out $raw/recorder_overhead.json"
    part gpu_overlap 100 "python3 benchmarks/gpu_overlap.py --preset llama-3.1-8b --scale 0.5 --out $raw/gpu_overlap.json"
}

tests() {
    pytest="python3 -m pytest -p no:cacheprovider -p no:benchmark -q -m gpu"
    memcheck="compute-sanitizer --tool memcheck --error-exitcode 9 $pytest"
    part tests 240 "$pytest -n 10 tests/gpu"
    part sanitizer_layers 60 "$memcheck tests/gpu/test_layer_kernels.py -k 'two_layers and 24'"
    part sanitizer_prompts 60 "$memcheck tests/gpu/test_kernels.py -k 'whole_tiles and 64 and 9'"
    part sanitizer_products 60 "$memcheck tests/gpu/test_streamed_products.py -k '33 or 64'"
}

both() { # two functions, each on a GPU of its own if there are two
    if [ "$(nvidia-smi --list-gpus | wc -l)" -lt 2 ]; then
        "$1"
        "$2"
        return
    fi
    (export CUDA_VISIBLE_DEVICES=0; "$1") & first=$!
    (export CUDA_VISIBLE_DEVICES=1; "$2") & second=$!
    wait $first $second
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
case $half in *1*) alone; both ours beside_ours ;; esac
case $half in *2*) both costs tests ;; esac
tar -C "$out" -czf "$out/raw.tar.gz" raw
