//! A digest of a JSON value's meaning: white space and the order of an object's fields do not
//! matter. Computed while parsing, so that a huge value is never held.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use sha2::{Digest, Sha256};

/// SHA-256 over length-prefixed parts, so that no two lists of parts run together.
pub(crate) fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// The digest of one JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueDigest(pub [u8; 32]);

impl<'de> Deserialize<'de> for ValueDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DigestVisitor)
    }
}

struct DigestVisitor;

impl<'de> Visitor<'de> for DigestVisitor {
    type Value = ValueDigest;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<ValueDigest, E> {
        Ok(ValueDigest(hash(&[b"null"])))
    }

    fn visit_bool<E>(self, value: bool) -> Result<ValueDigest, E> {
        Ok(ValueDigest(hash(&[b"bool", &[u8::from(value)]])))
    }

    fn visit_u64<E>(self, value: u64) -> Result<ValueDigest, E> {
        Ok(ValueDigest(hash(&[b"integer", &i128::from(value).to_le_bytes()])))
    }

    fn visit_i64<E>(self, value: i64) -> Result<ValueDigest, E> {
        Ok(ValueDigest(hash(&[b"integer", &i128::from(value).to_le_bytes()])))
    }

    fn visit_f64<E>(self, value: f64) -> Result<ValueDigest, E> {
        Ok(ValueDigest(hash(&[b"float", &value.to_bits().to_le_bytes()])))
    }

    fn visit_str<E>(self, value: &str) -> Result<ValueDigest, E> {
        Ok(ValueDigest(hash(&[b"string", value.as_bytes()])))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ValueDigest, A::Error> {
        let mut hasher = Sha256::new_with_prefix(b"array");
        while let Some(ValueDigest(item)) = items.next_element()? {
            hasher.update(item);
        }
        Ok(ValueDigest(hasher.finalize().into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<ValueDigest, A::Error> {
        // A sum does not depend on the order of its terms.
        let (mut low, mut high) = (0u128, 0u128);
        while let Some((ValueDigest(key), ValueDigest(value))) = fields.next_entry()? {
            let field = hash(&[&key, &value]);
            let (first, second) = field.split_at(16);
            low = low.wrapping_add(u128::from_le_bytes(first.try_into().expect("16 bytes")));
            high = high.wrapping_add(u128::from_le_bytes(second.try_into().expect("16 bytes")));
        }
        Ok(ValueDigest(hash(&[b"object", &low.to_le_bytes(), &high.to_le_bytes()])))
    }
}

#[cfg(test)]
mod tests {
    use super::ValueDigest;

    fn check(left: &str, right: &str, same: bool) {
        let left_digest: ValueDigest = serde_json::from_str(left).unwrap();
        let right_digest: ValueDigest = serde_json::from_str(right).unwrap();
        assert_eq!(left_digest == right_digest, same, "{left} against {right}");
    }

    #[test]
    fn meaning_counts_and_spelling_does_not() {
        check(r#"{"a":1,"b":[true,null]}"#, r#"{ "b": [true, null], "a": 1 }"#, true);
        check(r#""\u0041""#, r#""A""#, true);
        check("[1,2]", "[2,1]", false);
        check("[[1],2]", "[1,[2]]", false);
        check(r#"{"a":"b"}"#, r#"{"b":"a"}"#, false);
        check("1", "\"1\"", false);
        check("1", "-1", false);
        check("{}", "[]", false);
        check("{}", r#"{"a":null}"#, false);
    }
}
