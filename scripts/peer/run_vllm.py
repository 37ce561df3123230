"""The job on vLLM for CPU: run_vllm.py FOLDER, a model in Hugging Face's layout."""

import os

import job

# Read when vllm is imported. One process, so that two threads are really two; memory for all contexts at once.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["OMP_NUM_THREADS"] = str(job.THREADS)

import vllm  # noqa: E402


def main():
    engine = vllm.LLM(
        job.MODEL,
        dtype="bfloat16" if job.HAS_BF16 else "float32",
        max_model_len=job.INPUT + job.OUTPUT,
        max_num_seqs=job.PROMPTS,
        enable_prefix_caching=job.PREFIX > 0,
    )

    def generate(prompts, output):
        sampling = vllm.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.generate(inputs, sampling, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results]

    job.measure(generate)


if __name__ == "__main__":
    main()
