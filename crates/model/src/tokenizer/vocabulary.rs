//! What each id stands for: its bytes, and whether it is control.

/// Bytes and kind of every id.
pub(super) struct Vocabulary {
    tokens: Vec<Token>,
}

#[derive(Clone, Default)]
struct Token {
    bytes: Box<[u8]>,
    special: bool,
}

impl Vocabulary {
    /// A vocabulary of `size` ids that stand for nothing yet.
    pub(super) fn with_size(size: usize) -> Self {
        Self { tokens: vec![Token::default(); size] }
    }

    /// Says what `id`, which must be below the size, stands for.
    pub(super) fn set(&mut self, id: u32, bytes: Vec<u8>, special: bool) {
        self.tokens[id as usize] = Token { bytes: bytes.into_boxed_slice(), special };
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], |token| &token.bytes)
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.tokens.get(id as usize).is_some_and(|token| token.special)
    }
}

/// The printable stand-ins that byte-level vocabularies are written in: a byte that prints as a
/// Latin-1 character is that character, the others follow from U+0100 on in order.
pub(super) struct ByteAlphabet {
    bytes: [Option<u8>; Self::END as usize],
}

impl ByteAlphabet {
    const END: u32 = 0x144;

    pub(super) fn new() -> Self {
        let mut bytes = [None; Self::END as usize];
        let mut next = 0x100;
        for byte in 0..=u8::MAX {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            if printable {
                bytes[usize::from(byte)] = Some(byte);
            } else {
                bytes[next] = Some(byte);
                next += 1;
            }
        }
        assert_eq!(next, Self::END as usize);
        Self { bytes }
    }

    /// The bytes `token` stands for; a token outside the alphabet stands for its own UTF-8.
    pub(super) fn decode(&self, token: &str) -> Vec<u8> {
        token
            .chars()
            .map(|character| self.bytes.get(character as usize).copied().flatten())
            .collect::<Option<Vec<u8>>>()
            .unwrap_or_else(|| token.as_bytes().to_vec())
    }
}

/// The byte that a fallback token such as `<0x0A>` stands for.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_has_a_stand_in_for_every_byte() {
        let alphabet = ByteAlphabet::new();
        let mut seen: Vec<u8> = alphabet.bytes.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(alphabet.decode("Ġthe"), b" the");
        assert_eq!(alphabet.decode("Ċ"), b"\n");
        assert_eq!(alphabet.decode("ðŁĻĤ"), "🙂".as_bytes());
        assert_eq!(alphabet.decode("▁x"), "▁x".as_bytes());
    }

    #[test]
    fn fallback_bytes() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xFF>"), Some(255));
        for not in ["<0x+1>", "<0x0>", "<0x00A>", "0x0A", "<0x0A", "<0xZZ>"] {
            assert_eq!(fallback_byte(not), None, "{not}");
        }
    }
}
