//! Any bytes may come in: no panic, and exactly one result line for each line that is not blank.

use crate::common::Case;
use proptest::prelude::*;

const GOOD: &[&str] = &[
    r#"{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"é\u0041"}]}],"max_completion_tokens":3,"logprobs":true,"top_logprobs":2}}"#,
    r#"{"custom_id":"b","method":"POST","url":"/v1/completions","body":{"prompt":[1,2,3],"stop":["x","yz"],"n":2,"seed":-5,"logit_bias":{"5":-1.5},"echo":true}}"#,
    r#"{"prompt":"hi","temperature":0.5,"top_p":0.9,"top_k":5,"min_p":0.1,"stop_token_ids":[9],"ignore_eos":false}"#,
];

/// A good line with some of its bytes changed, removed, doubled or cut off.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let mutation = (any::<prop::sample::Index>(), any::<u8>(), 0..5u8);
    (0..GOOD.len(), prop::collection::vec(mutation, 0..4)).prop_map(|(line, mutations)| {
        let mut bytes = GOOD[line].as_bytes().to_vec();
        for (at, byte, kind) in mutations {
            let at = at.index(bytes.len().max(1)).min(bytes.len());
            match kind {
                _ if at == bytes.len() => bytes.push(byte),
                0 => bytes[at] = byte,
                1 => _ = bytes.remove(at),
                2 => bytes.insert(at, bytes[at]),
                3 => bytes[at] = b"0[]{}\",:-e"[usize::from(byte) % 10],
                _ => bytes.truncate(at),
            }
        }
        bytes
    })
}

fn check_one_result_each(lines: &[Vec<u8>]) {
    // An input is known by its beginning, so it begins like one.
    let begin = b"{\"prompt\":\"begin\"}".to_vec();
    let lines: Vec<Vec<u8>> = std::iter::once(begin).chain(lines.iter().cloned()).collect();
    let case = Case::new(lines.join(&b'\n'));
    let wanted = lines
        .iter()
        .flat_map(|line| line.split(|byte| *byte == b'\n'))
        .filter(|line| !line.trim_ascii().is_empty())
        .count();
    let summary = case.run().unwrap();
    assert_eq!(summary.succeeded + summary.failed, wanted as u64);
    let output = case.sorted();
    assert_eq!(output.len(), wanted);
    for line in &output {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let status = line["response"]["status_code"].as_u64();
        assert!(matches!(status, Some(200 | 400)), "{line}");
    }
    let again = case.run().unwrap();
    assert_eq!(again.resumed, wanted as u64, "every line is recognised");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn arbitrary_bytes_get_a_result(lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..40)) {
        check_one_result_each(&lines);
    }

    #[test]
    fn mutated_requests_get_a_result(lines in prop::collection::vec(mutated(), 1..60)) {
        check_one_result_each(&lines);
    }
}
