"""The job that scripts/peers gives to every engine, and how it is timed; the engines are elsewhere."""

import os
import sys
import time

# Set by scripts/peers for all engines alike.
PROMPTS = int(os.environ["PEER_PROMPTS"])
INPUT = int(os.environ["PEER_INPUT"])
PREFIX = int(os.environ["PEER_PREFIX"])  # of the input, the same for all prompts
OUTPUT = int(os.environ["PEER_OUTPUT"])
THREADS = int(os.environ["PEER_THREADS"])
MODEL = sys.argv[1]
VOCABULARY = 49152
# An engine compiles, allocates and tunes in its first steps; this many are enough.
WARM_UP_OUTPUT = 8
# Without bf16 instructions, OpenVINO supports f32 only, and vLLM is about as fast in it.
with open("/proc/cpuinfo") as information:
    HAS_BF16 = "avx512_bf16" in information.read()


def prompts(run):
    """Token ids without meaning, those of `glinthawk bench`: other ones in every run."""

    def token(prompt, position):
        return ((run if position < PREFIX else prompt) * 7919 + position * 104729) % VOCABULARY

    first = run * PROMPTS
    return [[token(prompt, position) for position in range(INPUT)] for prompt in range(first, first + PROMPTS)]


def measure(generate):
    """Prints the tokens per second of `generate(prompts, output)`, which returns the generated tokens."""
    check(generate(prompts(0), WARM_UP_OUTPUT), WARM_UP_OUTPUT)
    started = time.perf_counter()
    generated = generate(prompts(1), OUTPUT)
    elapsed_s = time.perf_counter() - started
    check(generated, OUTPUT)
    if not HAS_BF16:
        print("note: computes in f32, because there are no bf16 instructions here")
    print(f"tokens/s: {PROMPTS * (INPUT + OUTPUT) / elapsed_s:.0f}")


def check(generated, output):
    """Every prompt must have said exactly as much as was asked for, or engines are not comparable."""
    lengths = sorted({len(tokens) for tokens in generated})
    if len(generated) != PROMPTS or lengths != [output]:
        sys.exit(f"{len(generated)} completions of {lengths} tokens, not {PROMPTS} of {output}")
