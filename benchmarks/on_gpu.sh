#!/usr/bin/env bash
# What a machine with a GPU shows of maxtrain, in half an hour at most: the tests marked gpu, a run
# that repeats bit for bit, the doctor, and the benchmarks of steps, of attention and of fit. Each part
# has its own time and goes on without the others; their output goes to FOLDER, and the tables into
# benchmarks/results. It ends with 1 if a part failed. Nothing falls back to the CPU.
#
#     make check-gpu            (or: benchmarks/on_gpu.sh PYTHON FOLDER [PART...])
set -uo pipefail

python=$1
folder=$2
shift 2
parts=("$@")
if [ ${#parts[@]} -eq 0 ]; then
  parts=(tests repeats kernel doctor train_step attention fit_here)
fi
known=" tests repeats kernel doctor train_step attention fit_here "
for name in "${parts[@]}"; do
  if [[ "$known" != *" $name "* ]]; then
    echo "no part $name; there are$known" >&2
    exit 64
  fi
done
mkdir -p "$folder"
failed=()
export JAX_PLATFORMS=cuda,cpu

# part NAME SECONDS COMMAND...: what it says goes into a file of its own, and its end is shown.
part() {
  local name=$1 seconds=$2
  shift 2
  local began=$SECONDS code=0
  timeout "$seconds" "$@" > "$folder/$name.log" 2>&1 || code=$?
  echo "=== $name: exit code $code after $((SECONDS - began)) s"
  tail -n 24 "$folder/$name.log"
  if [ "$code" -ne 0 ]; then
    failed+=("$name")
  fi
}

prepared() {
  [ -e data/stdlib/train/manifest.json ] ||
    "$python" -m data_pipeline.prepare data/stdlib --python-stdlib --tokenizer bpe:4096 --holdout 0.05
}

# A run of sixty steps, and its second half again.
repeats() {
  set -e
  prepared
  rm -rf "$folder/repeats"
  "$python" -m maxtrain.train config=quickstart output_dir="$folder" run_name=repeats determinism=full steps=60 \
    checkpoint_interval=30 eval_interval=60 observe.progress=plain
  "$python" -m maxtrain.cli replay "$folder/repeats" --steps 30:60
}

# The quickstart with our own kernel of attention, and its second half again.
kernel() {
  set -e
  prepared
  rm -rf "$folder/kernel"
  "$python" -m maxtrain.train config=quickstart output_dir="$folder" run_name=kernel \
    model.attention=triton observe.progress=plain
  "$python" -m maxtrain.cli replay "$folder/kernel" --steps 160:320
}
export -f prepared repeats kernel
export python folder

for name in "${parts[@]}"; do
  case $name in
    tests)
      part tests 240 env MAXTRAIN_TEST_PLATFORM=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false \
        "$python" -m pytest -n 0 -m gpu tests/ops tests/models tests/train_step tests/weights \
        --tb=short -rA
      ;;
    repeats | kernel) part "$name" 240 bash -c "$name" ;;
    doctor) part doctor 90 "$python" -m maxtrain.cli doctor ;;
    train_step) part train_step 240 "$python" -m benchmarks.train_step --write ;;
    attention) part attention 240 "$python" -m benchmarks.attention --write ;;
    fit_here) part fit_here 420 "$python" -m benchmarks.fit_here --gpu --write ;;
  esac
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; what they said: $folder" >&2
  exit 1
fi
