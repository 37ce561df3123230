"""The job on llama.cpp, through the plain C interface of llama-cpp-python: run_llama.py MODEL.gguf."""

import ctypes
import os
import sys

import job
import llama_cpp as llama
import numpy

BATCH = max(2048, job.INPUT)  # tokens handed over at once; llama.cpp cuts them as it likes


def load(repacked):
    """Returns the job's `generate`; weights may be repacked for the matrix unit."""
    model_parameters = llama.llama_model_default_params()
    model_parameters.use_extra_bufts = repacked
    model = llama.llama_model_load_from_file(job.MODEL.encode(), model_parameters)
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = job.PROMPTS * (job.INPUT + job.OUTPUT)
    parameters.n_batch = BATCH
    parameters.n_seq_max = job.PROMPTS
    parameters.n_threads = parameters.n_threads_batch = job.THREADS
    # Every prompt has its own context. In a shared one, prompts would attend to each other.
    parameters.kv_unified = False
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        sys.exit("llama.cpp made no context")
    batch = llama.llama_batch_init(BATCH, 0, 1)

    def decode(rows):
        """Passes rows (token, position, prompt, last of its prompt?) through the model: the next token of each last."""
        batch.n_tokens = len(rows)
        for index, (token, position, prompt, last) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = prompt
            batch.logits[index] = last
        code = llama.llama_decode(context, batch)
        if code != 0:
            sys.exit(f"llama_decode answered {code}")
        logits = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        shape = (sum(row[3] for row in rows), job.VOCABULARY)
        return numpy.ctypeslib.as_array(logits, shape).argmax(axis=1).tolist()

    def generate(prompts, output):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        generated = []
        together = BATCH // job.INPUT
        for first in range(0, len(prompts), together):
            rows = [
                (token, position, first + offset, position == job.INPUT - 1)
                for offset, prompt in enumerate(prompts[first : first + together])
                for position, token in enumerate(prompt)
            ]
            generated += [[token] for token in decode(rows)]
        for position in range(job.INPUT, job.INPUT + output - 1):
            rows = [(tokens[-1], position, prompt, True) for prompt, tokens in enumerate(generated)]
            for tokens, token in zip(generated, decode(rows)):
                tokens.append(token)
        return generated

    return generate


def survives_repacking():
    """Whether a process lives through one prompt that way: some builds die of an illegal instruction in it."""
    child = os.fork()
    if child == 0:
        load(repacked=True)(job.prompts(0)[:1], 2)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


llama.llama_backend_init()
repacked = survives_repacking()
if not repacked:
    print("note: without repacked weights (and so without AMX), for with them it crashed")
job.measure(load(repacked))
