//! Cuts a template's source into tokens, and takes out the white space that Jinja2 takes out with
//! `trim_blocks` and `lstrip_blocks`.

use super::Error;
use super::text::is_space;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TokenKind {
    /// Text outside of tags; never empty.
    Data(String),
    BlockBegin,
    BlockEnd,
    PrintBegin,
    PrintEnd,
    Name(Arc<str>),
    Text(String),
    Integer(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) kind: TokenKind,
    pub(super) line: u32,
}

/// Longest first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

pub(super) fn tokenize(source: &str) -> Result<Vec<Token>, Error> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer =
        Lexer { rest: source, line: 1, at_line_start: true, tokens: Vec::new(), open: Vec::new() };
    while !lexer.rest.is_empty() {
        lexer.data()?;
    }
    lexer.push(TokenKind::End);
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    /// Whether what was taken last ended in a line break.
    at_line_start: bool,
    tokens: Vec<Token>,
    /// Brackets of the current tag that wait for their other half.
    open: Vec<&'static str>,
}

impl<'a> Lexer<'a> {
    fn push(&mut self, kind: TokenKind) {
        self.tokens.push(Token { kind, line: self.line });
    }

    fn wrong(&self, message: impl Into<String>) -> Error {
        Error::syntax(self.line, message)
    }

    /// Takes `length` bytes off the source.
    fn take(&mut self, length: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        self.line += taken.bytes().filter(|&byte| byte == b'\n').count() as u32;
        if !taken.is_empty() {
            self.at_line_start = taken.ends_with('\n');
        }
        taken
    }

    fn take_spaces(&mut self) {
        let length = self.rest.len() - self.rest.trim_start_matches(is_space).len();
        self.take(length);
    }

    fn take_prefix(&mut self, prefix: &str) -> bool {
        let found = self.rest.starts_with(prefix);
        if found {
            self.take(prefix.len());
        }
        found
    }

    /// Text up to the next tag, and the tag.
    fn data(&mut self) -> Result<(), Error> {
        let bytes = self.rest.as_bytes();
        let opens =
            |(index, _): &(usize, &str)| matches!(bytes.get(index + 1), Some(b'{' | b'%' | b'#'));
        let Some((start, _)) = self.rest.match_indices('{').find(opens) else {
            let text = self.take(self.rest.len()).to_owned();
            self.push(TokenKind::Data(text));
            return Ok(());
        };
        let was_line_start = self.at_line_start;
        let line = self.line;
        let text = self.take(start);
        let opening = self.take(2);
        let text = self.trimmed(text, opening != "{{", was_line_start);
        if !text.is_empty() {
            self.tokens.push(Token { kind: TokenKind::Data(text.to_owned()), line });
        }
        match opening {
            "{#" => self.comment(),
            "{%" if self.raw_begins() => self.raw(),
            "{%" => self.tag(TokenKind::BlockBegin, TokenKind::BlockEnd, "%}"),
            _ => self.tag(TokenKind::PrintBegin, TokenKind::PrintEnd, "}}"),
        }
    }

    /// Text before a tag that has just been opened, and takes the tag's sign.
    fn trimmed(&mut self, text: &'a str, is_block: bool, at_line_start: bool) -> &'a str {
        if self.take_prefix("-") {
            return text.trim_end_matches(is_space);
        }
        if self.take_prefix("+") || !is_block {
            return text;
        }
        let line = text.rfind('\n').map_or(0, |position| position + 1);
        let blank = text[line..].chars().all(is_space);
        if (line > 0 || at_line_start) && blank { &text[..line] } else { text }
    }

    /// Takes the end of a block or comment, with what goes with it.
    fn block_end(&mut self, end: &str) -> bool {
        let rest = self.rest;
        if let Some(rest) = rest.strip_prefix('-')
            && rest.starts_with(end)
        {
            self.take(1 + end.len());
            self.take_spaces();
            return true;
        }
        if let Some(rest) = rest.strip_prefix('+')
            && rest.starts_with(end)
        {
            self.take(1 + end.len());
            return true;
        }
        if !self.take_prefix(end) {
            return false;
        }
        self.take_prefix("\n");
        true
    }

    fn comment(&mut self) -> Result<(), Error> {
        let Some(end) = self.rest.find("#}") else {
            return Err(self.wrong("a comment has no end"));
        };
        // A sign in front of the end belongs to it.
        let sign = self.rest[..end].ends_with(['-', '+']);
        self.take(end - usize::from(sign));
        self.block_end("#}");
        Ok(())
    }

    /// Whether this tag is `raw`; takes it if so. Only here is the line break behind a block kept.
    fn raw_begins(&mut self) -> bool {
        let Some(rest) = self.rest.trim_start_matches(is_space).strip_prefix("raw") else {
            return false;
        };
        let rest = rest.trim_start_matches(is_space);
        let rest = match (rest.strip_prefix("-%}"), rest.strip_prefix("%}")) {
            (Some(rest), _) => rest.trim_start_matches(is_space),
            (None, Some(rest)) => rest,
            (None, None) => return false,
        };
        self.take(self.rest.len() - rest.len());
        true
    }

    fn raw(&mut self) -> Result<(), Error> {
        let was_line_start = self.at_line_start;
        let line = self.line;
        let mut from = 0;
        loop {
            let Some(start) = self.rest[from..].find("{%").map(|start| from + start) else {
                return Err(self.wrong("a raw block has no end"));
            };
            let tag = &self.rest[start + 2..];
            let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start_matches(is_space);
            let Some(after) = tag.strip_prefix("endraw") else {
                from = start + 2;
                continue;
            };
            let after = after.trim_start_matches(is_space);
            if !["%}", "-%}", "+%}"].iter().any(|end| after.starts_with(end)) {
                from = start + 2;
                continue;
            }
            let after = after.len();
            let text = self.take(start);
            self.take(2);
            let text = self.trimmed(text, true, was_line_start);
            if !text.is_empty() {
                self.tokens.push(Token { kind: TokenKind::Data(text.to_owned()), line });
            }
            self.take(self.rest.len() - after);
            self.block_end("%}");
            return Ok(());
        }
    }

    fn tag(&mut self, begin: TokenKind, end: TokenKind, closing: &str) -> Result<(), Error> {
        self.push(begin);
        self.open.clear();
        loop {
            self.take_spaces();
            if self.rest.is_empty() {
                return Err(self.wrong(format!("the end of the tag, `{closing}`, is missing")));
            }
            if self.open.is_empty() && self.tag_end(closing) {
                self.push(end);
                return Ok(());
            }
            self.token()?;
        }
    }

    fn tag_end(&mut self, closing: &str) -> bool {
        if closing == "%}" {
            return self.block_end(closing);
        }
        if self.rest.strip_prefix('-').is_some_and(|rest| rest.starts_with(closing)) {
            self.take(1 + closing.len());
            self.take_spaces();
            return true;
        }
        self.take_prefix(closing)
    }

    fn token(&mut self) -> Result<(), Error> {
        let first = self.rest.chars().next().unwrap_or_default();
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '_' || first.is_alphanumeric() {
            let word = |character: char| character == '_' || character.is_alphanumeric();
            let length = self.rest.find(|character| !word(character)).unwrap_or(self.rest.len());
            let name = self.take(length).into();
            self.push(TokenKind::Name(name));
            return Ok(());
        }
        if first == '"' || first == '\'' {
            return self.string(first);
        }
        let rest = self.rest;
        let Some(operator) = OPERATORS.into_iter().find(|it| rest.starts_with(it)) else {
            return Err(self.wrong(format!("unexpected character {first:?}")));
        };
        match operator {
            "(" | "[" | "{" => self.open.push(operator),
            ")" | "]" | "}" => {
                let expected = match operator {
                    ")" => "(",
                    "]" => "[",
                    _ => "{",
                };
                if self.open.pop() != Some(expected) {
                    return Err(self.wrong(format!("unexpected `{operator}`")));
                }
            }
            _ => {}
        }
        self.take(operator.len());
        self.push(TokenKind::Operator(operator));
        Ok(())
    }

    fn number(&mut self) -> Result<(), Error> {
        let digits = |text: &str| {
            text.find(|it: char| !it.is_ascii_digit() && it != '_').unwrap_or(text.len())
        };
        let prefixes = [("0x", 16), ("0X", 16), ("0o", 8), ("0O", 8), ("0b", 2), ("0B", 2)];
        for (prefix, radix) in prefixes {
            if let Some(rest) = self.rest.strip_prefix(prefix) {
                let length =
                    rest.find(|it: char| !it.is_digit(radix) && it != '_').unwrap_or(rest.len());
                let text = rest[..length].replace('_', "");
                let value = i128::from_str_radix(&text, radix)
                    .map_err(|_| self.wrong(format!("`{prefix}{text}` is no number")))?;
                self.take(prefix.len() + length);
                self.push(TokenKind::Integer(value));
                return Ok(());
            }
        }
        let mut length = digits(self.rest);
        let mut is_float = false;
        // An attribute that is a number, as in `pair.0.1`, is no fraction.
        let after_dot =
            matches!(self.tokens.last().map(|token| &token.kind), Some(TokenKind::Operator(".")));
        let starts_digit = |text: &str| text.starts_with(|it: char| it.is_ascii_digit());
        if let Some(fraction) = self.rest[length..].strip_prefix('.')
            && starts_digit(fraction)
            && !after_dot
        {
            length += 1 + digits(fraction);
            is_float = true;
        }
        if let Some(exponent) = self.rest[length..].strip_prefix(['e', 'E']) {
            let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if starts_digit(unsigned) && !after_dot {
                length += 1 + (exponent.len() - unsigned.len()) + digits(unsigned);
                is_float = true;
            }
        }
        let text = self.take(length).replace('_', "");
        let wrong = || format!("`{text}` is no number that can be used");
        let kind = match is_float {
            true => TokenKind::Float(text.parse().map_err(|_| self.wrong(wrong()))?),
            false => TokenKind::Integer(text.parse().map_err(|_| self.wrong(wrong()))?),
        };
        self.push(kind);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), Error> {
        let mut escaped = false;
        let end = self.rest[1..].find(|character| {
            let ends = character == quote && !escaped;
            escaped = character == '\\' && !escaped;
            ends
        });
        let Some(end) = end else { return Err(self.wrong("a string has no end")) };
        let line = self.line;
        let text = self.take(end + 2);
        let text = unescaped(&text[1..=end]).map_err(|message| Error::syntax(line, message))?;
        self.tokens.push(Token { kind: TokenKind::Text(text), line });
        Ok(())
    }
}

/// A string's text with Python's escapes replaced; what is no escape stays as it is.
fn unescaped(source: &str) -> Result<String, String> {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('\\') {
        text.push_str(&rest[..start]);
        rest = &rest[start + 1..];
        let Some(letter) = rest.chars().next() else { break };
        rest = &rest[letter.len_utf8()..];
        let (digits, radix) = match letter {
            'x' => (2, 16),
            'u' => (4, 16),
            'U' => (8, 16),
            '0'..='7' => {
                let length =
                    1 + rest.bytes().take(2).take_while(|it| (b'0'..=b'7').contains(it)).count();
                let from = source.len() - rest.len() - 1;
                let code = u32::from_str_radix(&source[from..from + length], 8).unwrap_or_default();
                text.extend(char::from_u32(code));
                rest = &rest[length - 1..];
                continue;
            }
            _ => {
                match letter {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'a' => text.push('\u{7}'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    'v' => text.push('\u{b}'),
                    '\\' | '\'' | '"' => text.push(letter),
                    '\n' => {}
                    other => text.extend(['\\', other]),
                }
                continue;
            }
        };
        let code = rest.get(..digits).and_then(|code| u32::from_str_radix(code, radix).ok());
        let Some(character) = code.and_then(char::from_u32) else {
            return Err(format!("`\\{letter}` is not followed by the code of a character"));
        };
        text.push(character);
        rest = &rest[digits..];
    }
    text.push_str(rest);
    Ok(text)
}
