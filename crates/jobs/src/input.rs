//! Lines of an input, one at a time, in bounded memory. An input is opened once; every reader of it
//! reads it through here.

use crate::error::JobError;
use crate::sniff::{Remedy, Sniffed, shell_quoted, sniff, sniff_address};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Longer input lines get an error line; no more than one such line is ever held.
pub const LINE_BYTES_MAX: usize = 16 << 20;
const BUFFER_BYTES: usize = 256 << 10;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Where requests come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

impl Input {
    /// Opens the input, and refuses a file that is not made of lines of JSON. (A stream's first
    /// bytes may take long to arrive, so its reader checks them.)
    pub fn open(&self) -> Result<OpenInput, JobError> {
        let fail = |source| JobError::OpenInput { input: self.to_string(), source };
        let path = match self {
            Self::File(path) => Some(path),
            Self::Stdin => None,
        };
        if let Some(sniffed) = path.and_then(|path| sniff_address(path)) {
            return Err(not_requests(self.to_string(), sniffed));
        }
        let mut file = match self {
            Self::Stdin => io::stdin().as_fd().try_clone_to_owned().map(File::from),
            Self::File(path) => File::open(path),
        }
        .map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if metadata.is_dir() {
            let what = "a folder, not a file";
            let name = self.to_string();
            let folder = shell_quoted(Path::new(name.trim_end_matches('/')));
            let remedy = Remedy::Pipe {
                purpose: "Join its files",
                command: format!("cat {folder}/*.jsonl"),
                output: "out.jsonl".to_owned(),
            };
            return Err(not_requests(name, Sniffed { what, remedy }));
        }
        let extent = match metadata.is_file() {
            true => {
                // Standard input may be a file whose beginning something else has read.
                let start_bytes = file.stream_position().map_err(fail)?;
                let bytes = metadata.len().saturating_sub(start_bytes);
                Some(Extent { start_bytes, bytes })
            }
            false => None,
        };
        let lines = lines_of(Source::File(file));
        let path = path.cloned();
        let mut input = OpenInput { name: self.to_string(), path, extent, lines };
        if input.extent.is_some() {
            input.sniff()?;
        }
        Ok(input)
    }
}

impl fmt::Display for Input {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdin => formatter.write_str("standard input"),
            Self::File(path) => path.display().fmt(formatter),
        }
    }
}

/// An open input: a regular file, which can be read again, or a stream, which cannot.
pub struct OpenInput {
    /// For messages.
    pub(crate) name: String,
    /// `None` for a stream that has no name in the file system.
    pub(crate) path: Option<PathBuf>,
    extent: Option<Extent>,
    pub(crate) lines: LineReader<BufReader<Source>>,
}

/// What an input's bytes come from.
pub(crate) enum Source {
    File(File),
    Stream(Box<dyn Read + Send>),
}

impl Read for Source {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(bytes),
            Self::Stream(stream) => stream.read(bytes),
        }
    }
}

impl Seek for Source {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::File(file) => file.seek(to),
            Self::Stream(_) => Err(io::ErrorKind::NotSeekable.into()),
        }
    }
}

fn lines_of(source: Source) -> LineReader<BufReader<Source>> {
    LineReader::new(BufReader::with_capacity(BUFFER_BYTES, source), LINE_BYTES_MAX)
}

/// The part of a regular file that is the input.
#[derive(Clone, Copy)]
struct Extent {
    start_bytes: u64,
    bytes: u64,
}

impl OpenInput {
    /// Requests that come from somewhere else than a file; `name` is for messages.
    pub fn stream(name: impl Into<String>, stream: impl Read + Send + 'static) -> Self {
        let lines = lines_of(Source::Stream(Box::new(stream)));
        Self { name: name.into(), path: None, extent: None, lines }
    }

    /// Size of a regular file; `None` for a stream.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.extent.map(|extent| extent.bytes)
    }

    /// Looks at the first bytes without consuming them; fails if they are not lines of JSON.
    pub(crate) fn sniff(&mut self) -> Result<(), JobError> {
        let sniffed = match self.lines.source.fill_buf() {
            Ok(start) => sniff(start, self.path.as_deref()),
            Err(source) => return Err(self.read_error(source)),
        };
        sniffed.map_or(Ok(()), |sniffed| Err(not_requests(self.name.clone(), sniffed)))
    }

    /// Whether nothing is left to read.
    pub(crate) fn is_at_end(&mut self) -> Result<bool, JobError> {
        let left = self.lines.source.fill_buf().map(<[u8]>::is_empty);
        left.map_err(|source| self.read_error(source))
    }

    /// Goes back to the first line of a regular file.
    pub(crate) fn rewind(&mut self) -> Result<(), JobError> {
        let extent = self.extent.expect("only regular files are read twice");
        let lines = &mut self.lines;
        (lines.number, lines.position_bytes) = (0, 0);
        let sought = lines.source.seek(SeekFrom::Start(extent.start_bytes));
        sought.map_err(|source| self.read_error(source))?;
        Ok(())
    }

    /// Names the input and the line in an error.
    pub(crate) fn read_error(&self, source: io::Error) -> JobError {
        JobError::ReadInput { input: self.name.clone(), line: self.lines.number, source }
    }
}

fn not_requests(input: String, Sniffed { what, remedy }: Sniffed) -> JobError {
    JobError::NotRequests { input, what, remedy }
}

/// What the next line is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextLine {
    /// In the buffer, without line break and byte order mark.
    Line,
    /// Longer than the limit, and thrown away.
    TooLong,
    /// There is none.
    End,
}

/// Cuts a stream into lines and never holds more than one of at most `limit_bytes`.
pub(crate) struct LineReader<R> {
    source: R,
    limit_bytes: usize,
    /// Lines read so far.
    pub(crate) number: u64,
    /// Bytes read so far, line breaks included.
    pub(crate) position_bytes: u64,
    line: Vec<u8>,
}

impl<R: BufRead> LineReader<R> {
    pub(crate) fn new(source: R, limit_bytes: usize) -> Self {
        Self { source, limit_bytes, number: 0, position_bytes: 0, line: Vec::new() }
    }

    /// The line that [`Self::advance`] read.
    pub(crate) fn line(&self) -> &[u8] {
        let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match self.number {
            1 => line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line),
            _ => line,
        }
    }

    pub(crate) fn advance(&mut self) -> io::Result<NextLine> {
        self.line.clear();
        self.line.shrink_to(BUFFER_BYTES);
        // The limit is on the line; its break and the input's byte order mark come on top.
        let mark_bytes = if self.number == 0 { BYTE_ORDER_MARK.len() } else { 0 };
        let most_bytes = (self.limit_bytes + 2 + mark_bytes) as u64;
        let bytes = self.source.by_ref().take(most_bytes).read_until(b'\n', &mut self.line)?;
        if bytes == 0 {
            return Ok(NextLine::End);
        }
        self.number += 1;
        self.position_bytes += bytes as u64;
        if self.line.ends_with(b"\n") || bytes as u64 != most_bytes {
            let fits = self.line().len() <= self.limit_bytes;
            return Ok(if fits { NextLine::Line } else { NextLine::TooLong });
        }
        self.line.clear();
        self.position_bytes += self.source.skip_until(b'\n')? as u64;
        Ok(NextLine::TooLong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of at most four bytes; `None` is one that is too long.
    fn check(input: &[u8], expected: &[Option<&str>]) {
        for capacity in [1, 3, 64] {
            let mut reader = LineReader::new(BufReader::with_capacity(capacity, input), 4);
            let mut lines = Vec::new();
            loop {
                match reader.advance().unwrap() {
                    NextLine::Line => {
                        lines.push(Some(String::from_utf8(reader.line().to_vec()).unwrap()));
                    }
                    NextLine::TooLong => lines.push(None),
                    NextLine::End => break,
                }
                assert!(reader.line.len() <= 9, "holds at most one line");
            }
            let lines: Vec<_> = lines.iter().map(Option::as_deref).collect();
            assert_eq!(lines, expected, "{input:?}");
            assert_eq!(reader.number, expected.len() as u64);
            assert_eq!(reader.position_bytes, input.len() as u64);
        }
    }

    #[test]
    fn lines_are_cut_and_bounded() {
        check(b"", &[]);
        check(b"a\nbc\n", &[Some("a"), Some("bc")]);
        check(b"a\r\n\r\n\nb", &[Some("a"), Some(""), Some(""), Some("b")]);
        check(b"\xef\xbb\xbfa\n\xef\xbb\xbf", &[Some("a"), Some("\u{feff}")]);
        check(b"abcd\nabcd\r\nabcd", &[Some("abcd"), Some("abcd"), Some("abcd")]);
        check(b"abcde\nabcde\r\nabcde", &[None, None, None]);
        check(b"a\nabcdefghijkl\nb\nabcdefghijkl", &[Some("a"), None, Some("b"), None]);
        check(b"\xef\xbb\xbfabcd\nb", &[Some("abcd"), Some("b")]);
    }
}
