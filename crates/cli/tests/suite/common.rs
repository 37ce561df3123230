//! Runs the binary as a user would, in a folder of its own, and reads what it left there.

use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Random weights of a small shape: every path of the engine, at once.
pub const TINY: &str = "dummy:tiny";

/// A command line, ready to run.
pub fn glinthawk<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glinthawk"));
    command.args(args).stdin(Stdio::null()).env_remove("GLINTHAWK_LOG");
    command
}

/// How a command ended and what it said.
#[derive(Debug)]
pub struct Finished {
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    pub fn of(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Self::wait(child.expect("the binary starts"))
    }

    pub fn wait(child: Child) -> Self {
        let output = child.wait_with_output().expect("the binary ends");
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("text on standard output"),
            stderr: String::from_utf8(output.stderr).expect("text on standard error"),
        }
    }

    /// Ended with this code and without a panic.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        self
    }

    /// Failed with exactly one line, which holds all of `parts` and no `Debug` print.
    #[track_caller]
    pub fn expect_error(self, parts: &[&str]) -> Self {
        self.expect_complaint(1, parts)
    }

    /// As `expect_error`, with another exit code.
    #[track_caller]
    pub fn expect_complaint(self, code: i32, parts: &[&str]) -> Self {
        let finished = self.expect(code);
        let text = &finished.stderr;
        assert_eq!(text.lines().count(), 1, "one line, not: {text}");
        assert!(text.starts_with("error: "), "{text}");
        for part in parts {
            assert!(text.contains(part), "\"{part}\" is missing in: {text}");
        }
        for debug in [" { ", "Error(", "Some(", "Os {", "kind:"] {
            assert!(!text.contains(debug), "a Debug print in: {text}");
        }
        finished
    }
}

/// A folder with an input file; the output and the statistics go beside it.
pub struct Case {
    pub folder: TempDir,
    pub model: String,
}

impl Case {
    pub fn new(input: impl AsRef<[u8]>) -> Self {
        let case = Self { folder: TempDir::new().expect("a folder"), model: TINY.to_owned() };
        fs::write(case.input(), input).expect("the input is written");
        case
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn input(&self) -> PathBuf {
        self.path("in.jsonl")
    }

    pub fn output(&self) -> PathBuf {
        self.path("out.jsonl")
    }

    /// `glinthawk run` of the input to the output, with further options.
    pub fn command(&self, options: &[&str]) -> Command {
        let mut command = glinthawk(["run", "--model", &self.model, "--output"]);
        command.arg(self.output()).arg(self.input()).args(options);
        command
    }

    pub fn run(&self, options: &[&str]) -> Finished {
        Finished::of(&mut self.command(options))
    }

    /// As `run`, with `--stats`, which are returned.
    pub fn run_with_stats(&self, options: &[&str]) -> (Finished, Value) {
        let path = self.path("stats.json");
        let finished = Finished::of(self.command(options).arg("--stats").arg(&path));
        let text = fs::read_to_string(&path).unwrap_or_else(|_| panic!("{}", finished.stderr));
        (finished, serde_json::from_str(&text).expect("statistics are JSON"))
    }

    /// The results of a job that starts anew with short contexts, and its statistics.
    pub fn results_with_stats(&self, options: &[&str]) -> (Vec<String>, Value) {
        let always = ["--overwrite", "--max-context", "192"];
        let (finished, stats) = self.run_with_stats(&[&always, options].concat());
        finished.expect(0);
        (self.results(), stats)
    }

    /// The output's lines as `results` gives them.
    pub fn results(&self) -> Vec<String> {
        results(&fs::read_to_string(self.output()).expect("there is an output"))
    }

    /// The output's lines by their custom id.
    pub fn answers(&self) -> BTreeMap<String, Value> {
        answers(&fs::read_to_string(self.output()).expect("there is an output"))
    }
}

/// Whole lines, byte for byte except `created` and `cached_tokens`, sorted by custom id.
#[track_caller]
pub fn results(output: &str) -> Vec<String> {
    assert!(output.is_empty() || output.ends_with('\n'), "the last line is torn");
    let mut lines: Vec<(String, String)> =
        output.lines().map(|line| (custom_id(line), repeatable(line))).collect();
    lines.sort();
    lines.into_iter().map(|(_, line)| line).collect()
}

/// Parsed lines by custom id; none may occur twice.
#[track_caller]
pub fn answers(output: &str) -> BTreeMap<String, Value> {
    let mut answers = BTreeMap::new();
    for line in output.lines() {
        let value: Value = serde_json::from_str(line).expect("a result line is JSON");
        let previous = answers.insert(custom_id(line), value);
        assert!(previous.is_none(), "two results for {}", custom_id(line));
    }
    answers
}

fn custom_id(line: &str) -> String {
    let value: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
    value["custom_id"].as_str().expect("a custom_id").to_owned()
}

/// Without the numbers that differ between two runs. A quote inside a JSON string is escaped, so a pattern is only
/// ever the field's name.
fn repeatable(line: &str) -> String {
    let mut line = line.to_owned();
    for field in ["\"created\":", "\"cached_tokens\":"] {
        let Some(start) = line.find(field) else { continue };
        let start = start + field.len();
        let digits = line[start..].bytes().take_while(u8::is_ascii_digit).count();
        line.replace_range(start..start + digits, "0");
    }
    line
}

/// The text of a line's only choice.
pub fn text(answer: &Value) -> &str {
    answer["response"]["body"]["choices"][0]["text"].as_str().expect("a completion")
}

/// Whole lines in a file that may be growing; 0 if it does not exist yet.
pub fn lines_in(path: &Path) -> usize {
    fs::read(path).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count())
}

/// A small seeded generator (splitmix64), so that a failure can be repeated.
pub struct Random(pub u64);

impl Random {
    /// Below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit
    }
}

/// Requests with everything that decides a token in the mix: `request-0` to `request-(count-1)`.
pub fn mixed_requests(count: u64, words_max: u64, tokens_max: u64) -> String {
    const SAMPLINGS: [&str; 8] = [
        r#""temperature":0"#,
        r#""temperature":0.8,"seed":17"#,
        r#""temperature":1,"top_k":40,"presence_penalty":0.5,"frequency_penalty":0.3"#,
        r#""temperature":0,"repetition_penalty":1.2,"logprobs":3"#,
        r#""temperature":1.2,"top_p":0.9,"n":3"#,
        r#""temperature":0.9,"min_p":0.01,"stop":["e","th"],"logit_bias":{"101":6}"#,
        r#""temperature":0,"ignore_eos":true,"echo":true"#,
        r#""temperature":1.5,"seed":-3,"logprobs":0,"stop_token_ids":[65,66,67,68]"#,
    ];
    let mut random = Random(count);
    let mut input = String::new();
    for number in 0..count {
        let sampling = SAMPLINGS[number as usize % SAMPLINGS.len()];
        let prompt = match number % 5 {
            4 => format!("{:?}", (0..=random.below(3 * words_max)).collect::<Vec<_>>()),
            _ => format!("\"{}\"", vec!["word"; 1 + random.below(words_max) as usize].join(" ")),
        };
        let tokens_max = 1 + random.below(tokens_max);
        input += &format!(
            "{{\"custom_id\":\"request-{number}\",\"prompt\":{prompt},\"max_tokens\":{tokens_max},{sampling}}}\n"
        );
    }
    input
}
