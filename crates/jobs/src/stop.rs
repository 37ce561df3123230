//! Finds the first stop string in a completion. Works on bytes, token by token, so that neither a
//! character split over tokens nor an engine that stops late changes where the text is cut.

/// Where a completion ends because of a stop string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Tokens up to and including the one that completed the stop string.
    pub(crate) tokens: u32,
    /// Bytes of text in front of the stop string.
    pub(crate) bytes: usize,
}

/// Watches one completion as its tokens arrive.
#[derive(Debug)]
pub(crate) struct StopWatch {
    /// The latest bytes that a stop string might have begun in.
    tail: Vec<u8>,
    /// Bytes that have left the tail.
    passed_bytes: usize,
    tokens: u32,
    cut: Option<Cut>,
}

impl StopWatch {
    pub(crate) fn new() -> Self {
        Self { tail: Vec::new(), passed_bytes: 0, tokens: 0, cut: None }
    }

    /// Takes the next token's bytes; tells where to cut once a stop string is complete.
    pub(crate) fn push(&mut self, stop_strings: &[String], bytes: &[u8]) -> Option<Cut> {
        if self.cut.is_some() {
            return self.cut;
        }
        self.tokens += 1;
        self.tail.extend_from_slice(bytes);
        let starts = stop_strings.iter().filter_map(|stop| find(&self.tail, stop.as_bytes()));
        if let Some(start) = starts.min() {
            self.cut = Some(Cut { tokens: self.tokens, bytes: self.passed_bytes + start });
            return self.cut;
        }
        let longest = stop_strings.iter().map(String::len).max().unwrap_or(0);
        let passed = self.tail.len().saturating_sub(longest.saturating_sub(1));
        self.tail.drain(..passed);
        self.passed_bytes += passed;
        None
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Bytes so far that no stop string can take back.
    pub(crate) fn settled_bytes(&self) -> usize {
        self.cut.map_or(self.passed_bytes, |cut| cut.bytes)
    }
}

fn find(text: &[u8], pattern: &[u8]) -> Option<usize> {
    text.windows(pattern.len()).position(|window| window == pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `pieces` are the tokens, parted by `|`; expected are kept tokens and text.
    fn check(pieces: &str, stops: &[&str], expected: Option<(u32, &str)>) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut watch = StopWatch::new();
        let mut first = None;
        for piece in pieces.split('|') {
            let cut = watch.push(&stops, piece.as_bytes());
            assert!(first.is_none() || first == cut, "a cut never moves");
            first = first.or(cut);
        }
        let text = pieces.replace('|', "");
        assert_eq!(first.map(|cut| (cut.tokens, &text[..cut.bytes])), expected, "{pieces}");
    }

    #[test]
    fn the_earliest_stop_string_cuts() {
        check("a|b|c|d", &["x"], None);
        check("a|b|c|d", &["c"], Some((3, "ab")));
        check("a|b|c|d", &["bc"], Some((3, "a")));
        check("abcd|e", &["d", "b"], Some((1, "a")));
        check("ab|cd", &["bcd", "c"], Some((2, "a")));
        check("ab|c|d", &["bcd", "c"], Some((2, "ab")));
        check("abc|abc|abd|x", &["abcabd"], Some((3, "abc")));
        check("one|END|more|END", &["END"], Some((2, "one")));
        check("|a||b|", &["ab"], Some((4, "")));
        check("é|ü", &["ü"], Some((2, "é")));
    }

    #[test]
    fn a_character_split_over_tokens_is_still_found() {
        let stops = ["é".to_owned()];
        let mut watch = StopWatch::new();
        assert_eq!(watch.push(&stops, b"a\xc3"), None);
        assert_eq!(watch.push(&stops, b"\xa9"), Some(Cut { tokens: 2, bytes: 1 }));
        assert_eq!(watch.settled_bytes(), 1);
    }
}
