//! A digest of a JSON value's meaning: white space and the order of an object's fields do not
//! matter. Computed while parsing, so that a huge value is never held.

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use sha2::{Digest, Sha256};
use std::fmt;

/// SHA-256 over length-prefixed parts, so that no two lists of parts run together.
pub(crate) fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// Fields that do not affect the result: accepted and ignored. Results are always written whole, so
/// asking for a stream changes nothing either.
pub(crate) const HARMLESS: &[&str] = &[
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream",
    "stream_options",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
];

/// A field that decides when a request runs, but not its result.
const PRIORITY: &str = "priority";

/// The digest of one line's JSON value, without the fields that do not affect its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineDigest(pub [u8; 32]);

impl<'de> Deserialize<'de> for LineDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Level::Line.deserialize(deserializer).map(Self)
    }
}

/// Where in a line a value stands. A request's fields are the line's own, or those of its `body`.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    Line,
    Body,
    Inside,
}

impl<'de> DeserializeSeed<'de> for Level {
    type Value = [u8; 32];

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<[u8; 32], D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level {
    type Value = [u8; 32];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<[u8; 32], E> {
        Ok(hash(&[b"null"]))
    }

    fn visit_bool<E>(self, value: bool) -> Result<[u8; 32], E> {
        Ok(hash(&[b"bool", &[u8::from(value)]]))
    }

    fn visit_u64<E>(self, value: u64) -> Result<[u8; 32], E> {
        Ok(hash(&[b"integer", &i128::from(value).to_le_bytes()]))
    }

    fn visit_i64<E>(self, value: i64) -> Result<[u8; 32], E> {
        Ok(hash(&[b"integer", &i128::from(value).to_le_bytes()]))
    }

    fn visit_f64<E>(self, value: f64) -> Result<[u8; 32], E> {
        Ok(hash(&[b"float", &value.to_bits().to_le_bytes()]))
    }

    fn visit_str<E>(self, value: &str) -> Result<[u8; 32], E> {
        Ok(hash(&[b"string", value.as_bytes()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<[u8; 32], A::Error> {
        let mut hasher = Sha256::new_with_prefix(b"array");
        while let Some(item) = items.next_element_seed(Self::Inside)? {
            hasher.update(item);
        }
        Ok(hasher.finalize().into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<[u8; 32], A::Error> {
        // A sum does not depend on the order of its terms.
        let (mut low, mut high) = (0u128, 0u128);
        while let Some(name) = fields.next_key::<String>()? {
            if self != Self::Inside && (name == PRIORITY || HARMLESS.contains(&&*name)) {
                fields.next_value::<IgnoredAny>()?;
                continue;
            }
            let inner =
                if self == Self::Line && name == "body" { Self::Body } else { Self::Inside };
            let value = fields.next_value_seed(inner)?;
            let field = hash(&[&hash(&[b"string", name.as_bytes()]), &value]);
            let (first, second) = field.split_at(16);
            low = low.wrapping_add(u128::from_le_bytes(first.try_into().expect("16 bytes")));
            high = high.wrapping_add(u128::from_le_bytes(second.try_into().expect("16 bytes")));
        }
        Ok(hash(&[b"object", &low.to_le_bytes(), &high.to_le_bytes()]))
    }
}

#[cfg(test)]
mod tests {
    use super::LineDigest;

    fn check(left: &str, right: &str, same: bool) {
        let left_digest: LineDigest = serde_json::from_str(left).unwrap();
        let right_digest: LineDigest = serde_json::from_str(right).unwrap();
        assert_eq!(left_digest == right_digest, same, "{left} against {right}");
    }

    #[test]
    fn meaning_counts_and_spelling_does_not() {
        check(r#"{"a":1,"b":[true,null]}"#, r#"{ "b": [true, null], "a": 1 }"#, true);
        check(r#""\u0041""#, r#""A""#, true);
        check("[1,2]", "[2,1]", false);
        check(r#"{"prompt":"a","user":"b","priority":3}"#, r#"{"prompt":"a"}"#, true);
        check(r#"{"body":{"prompt":"a","model":"m"}}"#, r#"{"body":{"prompt":"a"}}"#, true);
        check(r#"{"prompt":{"user":"b"}}"#, r#"{"prompt":{}}"#, false);
        check("[[1],2]", "[1,[2]]", false);
        check(r#"{"a":"b"}"#, r#"{"b":"a"}"#, false);
        check("1", "\"1\"", false);
        check("1", "-1", false);
        check("{}", "[]", false);
        check("{}", r#"{"a":null}"#, false);
    }
}
