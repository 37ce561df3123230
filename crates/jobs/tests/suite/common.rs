//! A small model that is all text and no weights, and an engine that answers at once.

use glinthawk_jobs::{
    Earlier, Input, Job, JobError, JobOptions, JobSummary, Next, OpenInput, Output, PreparedJob,
    ServedModel,
};
use glinthawk_model::{ChatTemplate, Tokenizer};
use glinthawk_protocol::{Completion, Finish, Generated, Prompt, PromptId};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// A byte is a token; 256 ends a text.
pub const END: u32 = 256;
pub const VOCAB: u32 = 300;
pub const CONTEXT_MAX: u32 = 64;

pub fn model() -> ServedModel {
    let template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\
                    {% endfor %}<assistant>";
    ServedModel {
        name: "bytes".to_owned(),
        identity: String::new(),
        tokenizer: Tokenizer::bytes(VOCAB as usize),
        template: Some(ChatTemplate::new(template, "template").unwrap()),
        vocab: VOCAB,
        context_max: CONTEXT_MAX,
        eos_tokens: vec![END],
    }
}

/// The model's answer to a prompt, as far as the engine lets it continue.
pub type Script = fn(&Prompt) -> Vec<u32>;

/// Says the prompt backwards, and ends.
pub fn backwards(prompt: &Prompt) -> Vec<u32> {
    prompt.tokens.iter().rev().copied().chain([END]).collect()
}

/// Says something that depends on the seed, and ends.
pub fn seeded(prompt: &Prompt) -> Vec<u32> {
    let seed = format!("{:016x}", prompt.sampling.seed);
    seed.bytes().map(u32::from).chain([END]).collect()
}

pub fn generated(prompt: &Prompt, token: u32) -> Generated {
    let alternatives = prompt.sampling.logprobs.unwrap_or(0);
    Generated {
        token,
        logprob: if prompt.sampling.logprobs.is_some() { -0.25 } else { 0.0 },
        alternatives: (0..u32::from(alternatives)).map(|i| (token + i, -0.25 - i as f32)).collect(),
    }
}

/// Names the prompt that the job handed out last.
pub fn submit(job: &mut Job) -> PromptId {
    static SUBMITTED: AtomicU64 = AtomicU64::new(0);
    let id = PromptId(SUBMITTED.fetch_add(1, Ordering::Relaxed));
    job.submitted(id);
    id
}

/// Runs a prompt to its end; `late` is how many tokens the engine goes on after it should stop.
pub fn complete(
    job: &mut Job,
    id: PromptId,
    prompt: &Prompt,
    script: Script,
    late: usize,
) -> Completion {
    let mut tokens = Vec::new();
    let mut finish = Finish::Length;
    let mut left = usize::MAX;
    for token in script(prompt) {
        if tokens.len() == prompt.tokens_max as usize || left == 0 {
            break;
        }
        let token = generated(prompt, token);
        if prompt.watched && job.token(id, &token).is_some() {
            left = late + 1;
        }
        left = left.saturating_sub(1);
        tokens.push(token.clone());
        if prompt.stop_ids.contains(&token.token) {
            finish = Finish::Stop;
            break;
        }
    }
    Completion { id, tokens, finish, shared: 0 }
}

/// A folder with an input and an output.
pub struct Case {
    pub folder: TempDir,
    pub model: ServedModel,
    pub script: Script,
    pub late: usize,
    pub earlier: Earlier,
}

impl Case {
    pub fn new(input: impl AsRef<[u8]>) -> Self {
        let case = Self {
            folder: TempDir::new().unwrap(),
            model: model(),
            script: backwards,
            late: 0,
            earlier: Earlier::Continue,
        };
        fs::write(case.input(), input).unwrap();
        case
    }

    pub fn input(&self) -> PathBuf {
        self.folder.path().join("in.jsonl")
    }

    pub fn output(&self) -> PathBuf {
        self.folder.path().join("out.jsonl")
    }

    pub fn open_input(&self) -> OpenInput {
        Input::File(self.input()).open().unwrap()
    }

    pub fn open(&self) -> Result<Job, JobError> {
        self.open_to(self.output(), &Input::File(self.input()))
    }

    pub fn open_to(&self, output: PathBuf, input: &Input) -> Result<Job, JobError> {
        let options = JobOptions { output: Output::File(output), earlier: self.earlier };
        let model = Arc::new(self.model.clone());
        PreparedJob::new(input.open()?, &options, Some(Arc::clone(&model)))?.start(model)
    }

    /// Runs to the end, with up to seven prompts in the engine, the latest finishing first.
    pub fn run(&self) -> Result<JobSummary, JobError> {
        self.run_input(&Input::File(self.input()))
    }

    /// As `run`, from another input.
    pub fn run_input(&self, input: &Input) -> Result<JobSummary, JobError> {
        let job = self.open_to(self.output(), input)?;
        self.run_job(job, usize::MAX).map(|summary| summary.expect("ran to its end"))
    }

    /// Runs until this many prompts have finished, and then stops as if killed.
    pub fn run_some(&self, finished_max: usize) -> Result<Option<JobSummary>, JobError> {
        self.run_job(self.open()?, finished_max)
    }

    pub fn run_job(
        &self,
        mut job: Job,
        finished_max: usize,
    ) -> Result<Option<JobSummary>, JobError> {
        let mut waiting = Vec::new();
        let mut finished = 0;
        loop {
            let next = job.next(Duration::from_millis(20))?;
            let exhausted = matches!(next, Next::Exhausted);
            if let Next::Prompt(prompt) = next {
                waiting.push((submit(&mut job), prompt));
            }
            while waiting.len() == 7 || (exhausted && !waiting.is_empty()) {
                if finished == finished_max {
                    return Ok(None);
                }
                let (id, prompt) = waiting.pop().unwrap();
                let completion = complete(&mut job, id, &prompt, self.script, self.late);
                job.finish(&completion)?;
                finished += 1;
            }
            if exhausted {
                return job.close().map(Some);
            }
        }
    }

    /// The prompts that the input becomes.
    pub fn prompts(&self) -> Vec<Prompt> {
        prompts_of(&mut self.open().unwrap())
    }

    pub fn output_text(&self) -> String {
        fs::read_to_string(self.output()).unwrap()
    }

    /// The output's lines without `created`, in no particular order.
    pub fn sorted(&self) -> Vec<String> {
        sorted(&self.output())
    }
}

/// The prompts that are left of a job.
pub fn prompts_of(job: &mut Job) -> Vec<Prompt> {
    let mut prompts = Vec::new();
    loop {
        match job.next(Duration::from_millis(20)).unwrap() {
            Next::Prompt(prompt) => prompts.push(prompt),
            Next::Later => {}
            Next::Exhausted => return prompts,
        }
    }
}

pub fn sorted(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let mut lines: Vec<String> = text.lines().map(without_created).collect();
    lines.sort();
    lines
}

pub fn without_created(line: &str) -> String {
    let mut value: Value = serde_json::from_str(line).unwrap();
    if let Some(body) = value.pointer_mut("/response/body").and_then(Value::as_object_mut) {
        body.shift_remove("created");
    }
    value.to_string()
}

/// The one output line of a job of one input line.
pub fn answer(line: &str) -> Value {
    let case = Case::new(line);
    case.run().unwrap();
    let output = case.output_text();
    assert_eq!(output.lines().count(), 1, "{line} gave {output}");
    serde_json::from_str(&output).unwrap()
}
