//! The default model's tokenizer and chat template against what the reference implementations say.

use glinthawk_model::{ChatMessage, ChatTemplate, Model, Tokenizer, testing};
use serde::Deserialize;

/// A case of the golden generations; the rest of its fields is for tests of the kernels.
#[derive(Deserialize)]
struct Generation {
    id: String,
    user: Option<String>,
    text: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    text_out: String,
}

/// A case of the golden encodings.
#[derive(Deserialize)]
struct Encoding {
    text: String,
    /// Control tokens in the text are text.
    plain: Vec<u32>,
    /// Control tokens in the text are control.
    control: Vec<u32>,
    /// Of `plain`.
    decoded: String,
}

fn load<T: for<'a> Deserialize<'a>>(file: &str) -> Vec<T> {
    let path = format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect(&path);
    serde_json::from_str(&text).expect(&path)
}

fn open() -> Option<(Tokenizer, ChatTemplate)> {
    let model = Model::open(&testing::default_model()?).expect("the default model opens");
    let tokenizer = Tokenizer::of(&model).expect("it has a tokenizer");
    let template = ChatTemplate::of(&model).expect("its template compiles").expect("it has one");
    Some((tokenizer, template))
}

#[test]
fn prompts_of_the_golden_generations() {
    let Some((tokenizer, template)) = open() else { return };
    let cases: Vec<Generation> = load("smollm2-135m-q4_1.greedy.json");
    assert_eq!(cases.len(), 13);
    for case in cases {
        let id = &case.id;
        assert_eq!(tokenizer.encode_rendered(&case.text, None), case.prompt_ids, "{id}");
        match case.user {
            None => assert_eq!(tokenizer.encode_prompt(&case.text), case.prompt_ids, "{id}"),
            Some(content) => {
                let messages = [ChatMessage { role: "user".to_owned(), content }];
                let rendered = template.render(&tokenizer, &messages).expect(id);
                assert_eq!(rendered, case.text, "{id}");
                let ids = template.encode(&tokenizer, &messages).expect(id);
                assert_eq!(ids, case.prompt_ids, "{id}");
            }
        }
        assert_eq!(tokenizer.decode(&case.prompt_ids, false), case.text, "{id}");
        assert_eq!(tokenizer.decode(&case.greedy_ids, true), case.text_out, "{id}");
    }
}

#[test]
fn mixed_text() {
    let Some((tokenizer, template)) = open() else { return };
    for case in load::<Encoding>("smollm2-135m.tokens.json") {
        let text = &case.text;
        assert_eq!(tokenizer.encode(text), case.plain, "{text:?}");
        assert_eq!(tokenizer.encode_rendered(text, None), case.control, "{text:?}");
        assert_eq!(tokenizer.decode(&case.plain, false), case.decoded, "{text:?}");
        assert_eq!(tokenizer.decode(&case.plain, true), case.decoded, "{text:?}");
        assert_eq!(tokenizer.decode(&case.control, false), case.decoded, "{text:?}");

        // The same text as a message: between the template's own tokens, all of it is text.
        let messages = [
            ChatMessage { role: "system".to_owned(), content: "s".to_owned() },
            ChatMessage { role: "user".to_owned(), content: text.clone() },
        ];
        let (begin, end, line) = (1, 2, tokenizer.encode("\n"));
        let mut expected = vec![begin];
        expected.extend(tokenizer.encode("system\ns"));
        expected.push(end);
        expected.extend(&line);
        expected.push(begin);
        expected.extend(tokenizer.encode(&format!("user\n{text}")));
        expected.push(end);
        expected.extend(&line);
        expected.push(begin);
        expected.extend(tokenizer.encode("assistant\n"));
        let ids = template.encode(&tokenizer, &messages).expect(text);
        assert_eq!(ids, expected, "{text:?}");
    }
}

#[test]
fn what_the_vocabulary_says() {
    let Some((tokenizer, _)) = open() else { return };
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.bos_token(), Some(1));
    assert_eq!(tokenizer.eos_tokens(), [2, 0]);
    assert!((0..17).all(|id| tokenizer.is_special(id)));
    assert!(!(17..49152).any(|id| tokenizer.is_special(id)));
    assert_eq!(tokenizer.token_text(1), "<|im_start|>");
    assert_eq!(tokenizer.token_bytes(216), b" ");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
}
