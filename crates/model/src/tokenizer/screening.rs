//! Looks at a `tokenizer.json` before the library reads it: strangers write these files, and parts of the library panic
//! on what it does not expect. Only the parts that byte-pair vocabularies use are let in, and none may make a text many
//! times longer.

use serde_json::Value;

/// Normalizers and pre-tokenizers that language models have.
const NORMALIZERS: [&str; 10] = [
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Strip",
    "StripAccents",
    "ByteLevel",
    "Prepend",
    "Replace",
];
const PRE_TOKENIZERS: [&str; 7] =
    ["ByteLevel", "Split", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation"];
const POST_PROCESSORS: [&str; 2] = ["ByteLevel", "TemplateProcessing"];
const DECODERS: [&str; 6] = ["ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"];

/// How many times longer all replacements together may make a text.
const GROWTH_MAX: usize = 64;

/// Whether the library can be given the file; else what is wrong with which part.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let file: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if !matches!(file["model"][affix].as_str(), None | Some("")) {
            return Err(format!("model.{affix}: not supported"));
        }
    }
    for (part, steps_of, known) in [
        ("normalizer", "normalizers", &NORMALIZERS[..]),
        ("pre_tokenizer", "pretokenizers", &PRE_TOKENIZERS),
        ("post_processor", "processors", &POST_PROCESSORS),
        ("decoder", "decoders", &DECODERS),
    ] {
        let mut steps = Vec::new();
        flatten(&file[part], steps_of, &mut steps);
        let mut growth: usize = 1;
        for step in steps {
            let kind = step["type"].as_str().unwrap_or_default();
            if !known.contains(&kind) {
                return Err(format!("{part}: \"{kind}\" is not supported"));
            }
            growth = growth.saturating_mul(growth_of(kind, step));
            if kind == "TemplateProcessing" {
                check_template(step)?;
            }
        }
        if growth > GROWTH_MAX {
            return Err(format!("{part}: texts would become {growth} times as long"));
        }
    }
    Ok(())
}

/// The steps of a part, those of sequences in sequences included; JSON is not nested deeply.
fn flatten<'a>(part: &'a Value, steps_of: &str, steps: &mut Vec<&'a Value>) {
    match (part["type"].as_str(), part[steps_of].as_array()) {
        (Some("Sequence"), Some(parts)) => {
            parts.iter().for_each(|part| flatten(part, steps_of, steps));
        }
        _ if part.is_null() => {}
        _ => steps.push(part),
    }
}

/// How many times longer a step makes the worst text.
fn growth_of(kind: &str, step: &Value) -> usize {
    let length = |field: &str| step[field].as_str().map_or(1, str::len);
    match kind {
        // What matches nothing at all goes between all characters, too.
        "Replace" if step["pattern"]["String"].as_str() != Some("") => length("content").max(1),
        "Replace" => length("content") + 1,
        "Prepend" => length("prepend").div_ceil(8),
        _ => 1,
    }
}

/// The library takes the tokens that a template names for granted.
fn check_template(step: &Value) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("post_processor: {what}"));
    for pieces in [&step["single"], &step["pair"]] {
        for piece in pieces.as_array().into_iter().flatten() {
            let Some(token) = piece.get("SpecialToken") else { continue };
            let Some(id) = token["id"].as_str() else { return wrong("a token without an id") };
            let Some(special) = step["special_tokens"].get(id) else {
                return wrong(&format!("\"{id}\" is not among its special tokens"));
            };
            let count = |field: &str| special[field].as_array().map(Vec::len);
            if count("ids") != count("tokens") {
                return wrong(&format!("\"{id}\" has other ids than tokens"));
            }
        }
    }
    Ok(())
}
