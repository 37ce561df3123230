//! Token ids to text, one at a time: characters split over tokens are held back until whole.

use super::Tokenizer;

/// Decodes a sequence as it grows.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Spaces still to be taken from the text's start.
    leading_spaces: usize,
    /// The beginning of a character whose other bytes are yet to come.
    pending: Vec<u8>,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool, leading_spaces: usize) -> Self {
        Self { tokenizer, skip_special, leading_spaces, pending: Vec::new() }
    }

    /// Takes the next token; returns the text that it completes, perhaps none.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        self.push_into(id, &mut text);
        text
    }

    /// Ends the sequence: bytes held back that will never make a character become U+FFFD.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    pub(super) fn finish_with(mut self, ids: &[u32]) -> String {
        let mut text = String::new();
        for &id in ids {
            self.push_into(id, &mut text);
        }
        text.push_str(&self.flush());
        text
    }

    fn push_into(&mut self, id: u32, text: &mut String) {
        let vocabulary = &self.tokenizer.shared.vocabulary;
        if self.skip_special && vocabulary.is_special(id) {
            return;
        }
        let mut bytes = vocabulary.bytes(id);
        while let [first, rest @ ..] = bytes
            && self.leading_spaces > 0
        {
            if *first == b' ' {
                bytes = rest;
                self.leading_spaces -= 1;
            } else {
                self.leading_spaces = 0;
            }
        }
        self.pending.extend_from_slice(bytes);
        let kept = take_complete(&self.pending, text);
        self.pending.drain(..self.pending.len() - kept);
    }
}

/// Appends the whole characters of `bytes` to `text`, with U+FFFD for invalid bytes. Returns how
/// many bytes at the end may still become a character.
fn take_complete(bytes: &[u8], text: &mut String) -> usize {
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return 0;
            }
            Err(error) => {
                let (valid, invalid) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).expect("checked by valid_up_to"));
                let Some(length) = error.error_len() else {
                    return invalid.len();
                };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &invalid[length..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ids: &[u32], pieces: &[&str], flushed: &str) {
        let mut decoder = Tokenizer::bytes(300).decoder(false);
        let got: Vec<String> = ids.iter().map(|&id| decoder.push(id)).collect();
        assert_eq!(got, pieces);
        assert_eq!(decoder.flush(), flushed);
        assert_eq!(Tokenizer::bytes(300).decode(ids, false), pieces.concat() + flushed);
    }

    #[test]
    fn characters_come_out_whole() {
        check(&[0x61, 0xc3, 0xa9], &["a", "", "é"], "");
        check(&[0xf0, 0x9f, 0x99, 0x82], &["", "", "", "🙂"], "");
    }

    #[test]
    fn bytes_that_make_no_character_are_replaced() {
        check(&[0xff, 0x61], &["\u{fffd}", "a"], "");
        check(&[0xf0, 0x9f, 0x61], &["", "", "\u{fffd}a"], "");
        check(&[0xf0, 0x9f], &["", ""], "\u{fffd}");
        check(&[0xe4, 0xe4], &["", "\u{fffd}"], "\u{fffd}");
    }

    #[test]
    fn ids_without_a_token_are_nothing() {
        check(&[0x61, 299, 5000, 0x62], &["a", "", "", "b"], "");
    }
}
