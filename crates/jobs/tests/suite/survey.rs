//! What is known of an input before its job: lines, lengths, and nothing that the job would not see.

use crate::common::Case;
use glinthawk_jobs::{
    Beginning, Earlier, JobOptions, OUTPUT_TOKENS_ASSUMED, Output, PreparedJob, RequestLength,
    Survey,
};
use std::sync::Arc;

fn survey(case: &Case, lines_max: u64) -> Survey {
    let mut input = case.open_input();
    let first = input.survey(&case.model, lines_max).unwrap();
    let second = input.survey(&case.model, lines_max).unwrap();
    assert_eq!(first, second, "the survey goes back to the first line");
    first.expect("a regular file")
}

fn check(input: &str, lines: u64, lengths: &[(u32, u32, u32)]) {
    let surveyed = survey(&Case::new(input), u64::MAX);
    let length = |&(prompt_tokens, output_tokens, choices)| RequestLength {
        prompt_tokens,
        output_tokens,
        choices,
        beginning: Beginning::default(),
    };
    assert_eq!((surveyed.lines, surveyed.lines_read), (lines, lines), "{input}");
    assert_eq!(surveyed.lengths, lengths.iter().map(length).collect::<Vec<_>>(), "{input}");
}

#[test]
fn lengths_are_those_that_the_job_will_run() {
    check("", 0, &[]);
    check("\n \r\n", 0, &[]);
    check(
        "{\"prompt\":\"abc\"}\n\n{\"prompt\":[1,2],\"max_tokens\":5,\"n\":3}",
        2,
        &[(3, 16, 1), (2, 5, 3)],
    );
    // Refused lines take no time: not JSON, an unknown field, a custom id that is taken, no room.
    let long = format!("{{\"prompt\":\"{}\"}}", "x".repeat(64));
    check("not json\n{\"prompt\":\"a\",\"typo\":1}", 2, &[]);
    check(
        "{\"custom_id\":\"a\",\"prompt\":\"b\"}\n{\"custom_id\":\"a\",\"prompt\":\"b\"}",
        2,
        &[(1, 16, 1)],
    );
    check(&long, 1, &[]);
    // More output than the context has room for is cut.
    check("{\"prompt\":\"abc\",\"max_tokens\":900000}", 1, &[(3, 61, 1)]);
}

#[test]
fn a_chat_is_as_long_as_its_template_makes_it() {
    let chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";
    let mut case = Case::new(chat);
    case.model.context_max = 10_000;
    let rendered = "<user>hi<assistant>".len() as u32;
    let expected = RequestLength {
        prompt_tokens: rendered,
        output_tokens: OUTPUT_TOKENS_ASSUMED,
        choices: 1,
        beginning: Beginning::default(),
    };
    assert_eq!(survey(&case, u64::MAX).lengths, [expected]);
}

#[test]
fn what_prompts_have_in_common_is_seen() {
    let line = |end: &str| format!("{{\"prompt\":\"{}{end}\"}}\n", "0123456789abcdef".repeat(2));
    let surveyed =
        survey(&Case::new(line("one") + &line("two") + "{\"prompt\":\"other\"}"), u64::MAX);
    let tokens: Vec<u32> = surveyed.lengths.iter().map(|length| length.beginning.tokens).collect();
    assert_eq!(tokens, [32, 32, 0]);
}

#[test]
fn lines_that_are_not_read_are_estimated_from_their_bytes() {
    let line = "{\"prompt\":\"abc\"}\n";
    let surveyed = survey(&Case::new(line.repeat(500)), 20);
    assert_eq!((surveyed.lines, surveyed.lines_read, surveyed.lengths.len()), (500, 20, 20));
    let surveyed = survey(&Case::new(line.repeat(20)), 20);
    assert_eq!((surveyed.lines, surveyed.lines_read), (20, 20));
}

#[test]
fn a_survey_takes_nothing_from_the_job() {
    let case = Case::new("{\"prompt\":\"abc\"}\n{\"prompt\":\"abd\"}\n");
    let mut input = case.open_input();
    input.survey(&case.model, 1).unwrap();
    let options = JobOptions { output: Output::File(case.output()), earlier: Earlier::Continue };
    let model = Arc::new(case.model.clone());
    let prepared = PreparedJob::new(input, &options, Some(Arc::clone(&model))).unwrap();
    let mut job = prepared.start(model).unwrap();
    let prompts = crate::common::prompts_of(&mut job).into_iter();
    assert_eq!(
        prompts.map(|prompt| prompt.tokens).collect::<Vec<_>>(),
        [[97, 98, 99], [97, 98, 100]]
    );
}
