//! Control tokens in rendered text: finding them, and guarding text that only looks like one.

use std::borrow::Cow;

/// Marks, inside text from requests, every place where a control token's text begins.
///
/// A chat template mixes its own control tokens with strings of the request. The mark goes behind
/// the first character of a control token's text in the request's strings, so that only the
/// template's own are found afterwards; then the marks are taken out again and every piece of text
/// is encoded as if they had never been there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sentinel(char);

impl Sentinel {
    /// A private-use character that none of `texts` contains; `None` if they contain them all.
    pub fn absent_from<'a>(texts: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        const FIRST: u32 = 0xe000;
        const LAST: u32 = 0xf8ff;
        let mut present = vec![false; (LAST - FIRST + 1) as usize];
        for character in texts.into_iter().flat_map(str::chars) {
            if let FIRST..=LAST = character as u32 {
                present[(character as u32 - FIRST) as usize] = true;
            }
        }
        let free = present.iter().position(|&present| !present)?;
        char::from_u32(FIRST + free as u32).map(Self)
    }
}

/// A stretch of rendered text.
#[derive(Debug, PartialEq)]
pub(super) enum Piece<'a> {
    Control(u32),
    /// Never empty.
    Text(Cow<'a, str>),
}

/// One control token as it is written.
#[derive(Clone, Debug)]
pub(super) struct ControlToken {
    pub(super) text: String,
    pub(super) id: u32,
    /// The token swallows white space on its left.
    pub(super) strip_left: bool,
    /// The token swallows white space on its right.
    pub(super) strip_right: bool,
}

impl ControlToken {
    /// A token that leaves the white space around it alone.
    pub(super) fn plain(text: &str, id: u32) -> Self {
        Self { text: text.to_owned(), id, strip_left: false, strip_right: false }
    }
}

/// All control tokens of a vocabulary, found leftmost and longest first.
#[derive(Default)]
pub(super) struct ControlTokens {
    /// By the text's first byte, longest text first.
    by_first_byte: Vec<Vec<ControlToken>>,
}

impl ControlTokens {
    pub(super) fn new(tokens: impl IntoIterator<Item = ControlToken>) -> Self {
        let mut by_first_byte = vec![Vec::new(); 256];
        for token in tokens {
            if let Some(&first) = token.text.as_bytes().first() {
                by_first_byte[usize::from(first)].push(token);
            }
        }
        for tokens in &mut by_first_byte {
            tokens.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then(a.id.cmp(&b.id)));
        }
        Self { by_first_byte }
    }

    /// The longest control token that `text` starts with.
    fn at_start_of(&self, text: &str) -> Option<&ControlToken> {
        let first = *text.as_bytes().first()?;
        self.by_first_byte
            .get(usize::from(first))?
            .iter()
            .find(|token| text.starts_with(&token.text))
    }

    pub(super) fn guard(&self, text: &str, sentinel: &Sentinel) -> String {
        let mut guarded = String::with_capacity(text.len());
        for (index, character) in text.char_indices() {
            guarded.push(character);
            if self.at_start_of(&text[index..]).is_some() {
                guarded.push(sentinel.0);
            }
        }
        guarded
    }

    /// Splits at control tokens and takes the sentinel's marks out of the text between them.
    pub(super) fn split<'a>(
        &self,
        rendered: &'a str,
        sentinel: Option<&Sentinel>,
    ) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let mut text_start = 0;
        let mut index = 0;
        while let Some(character) = rendered[index..].chars().next() {
            let Some(token) = self
                .at_start_of(&rendered[index..])
                // A mark behind the last character: that character came from the request.
                .filter(|token| !starts_with_mark(&rendered[index + token.text.len()..], sentinel))
            else {
                index += character.len_utf8();
                continue;
            };
            let before = &rendered[text_start..index];
            let before = match token.strip_left {
                true => before.trim_end(),
                false => before,
            };
            push_text(&mut pieces, before, sentinel);
            pieces.push(Piece::Control(token.id));
            index += token.text.len();
            if token.strip_right {
                index = rendered.len() - rendered[index..].trim_start().len();
            }
            text_start = index;
        }
        push_text(&mut pieces, &rendered[text_start..], sentinel);
        pieces
    }
}

fn starts_with_mark(text: &str, sentinel: Option<&Sentinel>) -> bool {
    sentinel.is_some_and(|sentinel| text.starts_with(sentinel.0))
}

fn push_text<'a>(pieces: &mut Vec<Piece<'a>>, text: &'a str, sentinel: Option<&Sentinel>) {
    let text = match sentinel {
        Some(sentinel) if text.contains(sentinel.0) => Cow::Owned(text.replace(sentinel.0, "")),
        _ => Cow::Borrowed(text),
    };
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(texts: &[(&str, u32)]) -> ControlTokens {
        ControlTokens::new(texts.iter().map(|&(text, id)| ControlToken::plain(text, id)))
    }

    /// Renders `template` with `%` replaced by the guarded `user` text, and splits that.
    fn check(texts: &[(&str, u32)], template: &str, user: &str, expected: &[Piece<'_>]) {
        let tokens = tokens(texts);
        let sentinel = Sentinel::absent_from([template, user]).expect("a free character");
        let rendered = template.replace('%', &tokens.guard(user, &sentinel));
        assert_eq!(tokens.split(&rendered, Some(&sentinel)), expected);
    }

    fn text(text: &str) -> Piece<'_> {
        Piece::Text(Cow::Borrowed(text))
    }

    #[test]
    fn only_the_templates_tokens_are_control() {
        let texts = [("<s>", 1), ("</s>", 2)];
        let expected = [Piece::Control(1), text("a<s>b</s>"), Piece::Control(2)];
        check(&texts, "<s>%</s>", "a<s>b</s>", &expected);
    }

    #[test]
    fn overlapping_and_nested_tokens_in_user_text_are_text() {
        let texts = [("<a>", 1), ("a><a", 2), ("<a><a>", 3)];
        check(&texts, "%", "<a><a><a>", &[text("<a><a><a>")]);
        check(&texts, "<a>%<a>", "a><a", &[Piece::Control(1), text("a><a"), Piece::Control(1)]);
    }

    #[test]
    fn the_longest_token_wins() {
        let texts = [("<a>", 1), ("<a><b>", 2)];
        let expected = [text("x"), Piece::Control(2), Piece::Control(1)];
        check(&texts, "x<a><b><a>", "", &expected);
    }

    #[test]
    fn a_token_of_one_character_in_user_text_is_text() {
        let texts = [("§", 1)];
        check(&texts, "§%", "a§", &[Piece::Control(1), text("a§")]);
    }

    #[test]
    fn private_use_characters_of_the_user_survive() {
        let expected = [Piece::Control(1), text("\u{e000}<s>\u{e001}")];
        check(&[("<s>", 1)], "<s>%", "\u{e000}<s>\u{e001}", &expected);
        let all: String = (0xe000..=0xf8ff).filter_map(char::from_u32).collect();
        assert_eq!(Sentinel::absent_from([all.as_str()]), None);
    }

    #[test]
    fn white_space_around_a_stripping_token_goes() {
        let tokens = ControlTokens::new([ControlToken {
            text: "<m>".to_owned(),
            id: 7,
            strip_left: true,
            strip_right: true,
        }]);
        assert_eq!(tokens.split("a \n<m>\t b", None), [text("a"), Piece::Control(7), text("b")]);
    }
}
