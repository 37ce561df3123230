//! Recognises an input that is not lines of JSON by its first bytes, and says what to do about it.

use std::fmt;
use std::path::Path;

const PICTURE_OF_A_LINE: &str = r#"{"prompt": "…"}"#;

/// A first look at an input.
pub(crate) struct Sniffed {
    /// What the input is, such as "a Parquet file".
    pub(crate) what: &'static str,
    pub(crate) remedy: Remedy,
}

/// What to do about an input that is not lines of JSON.
#[derive(Debug)]
pub enum Remedy {
    /// In words.
    Words(String),
    /// A command prints the lines, and `run` reads them from standard input.
    Pipe {
        /// What the command does, such as "Unpack it".
        purpose: &'static str,
        /// As a shell takes it.
        command: String,
        /// Where results could go, as a shell takes it.
        output: String,
    },
}

impl fmt::Display for Remedy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Words(words) => formatter.write_str(words),
            Self::Pipe { purpose, command, output } => {
                write!(
                    formatter,
                    "{purpose} and pipe it in: {command} | glinthawk run - -o {output}"
                )
            }
        }
    }
}

/// How a kind of file begins, what it is called, and the command that prints what is in it.
const COMPRESSED: &[(&[u8], &str, &str)] = &[
    (b"\x1f\x8b", "compressed with gzip", "zcat"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "zstdcat"),
    (b"\xfd7zXZ\0", "compressed with xz", "xzcat"),
    (b"BZh", "compressed with bzip2", "bzcat"),
    (b"PK\x03\x04", "a zip archive", "unzip -p"),
];

/// Looks at an input's first bytes; `path` is where they come from, unless that is standard input.
/// `None` if they may be lines of JSON.
pub(crate) fn sniff(start: &[u8], path: Option<&Path>) -> Option<Sniffed> {
    let name = path.map(shell_quoted);
    for (magic, what, tool) in COMPRESSED {
        if start.starts_with(magic) {
            let command = match &name {
                Some(name) => format!("{tool} {name}"),
                None => format!("… | {tool}"),
            };
            let output = path.map_or("out.jsonl".to_owned(), unpacked_output);
            let remedy = Remedy::Pipe { purpose: "Unpack it", command, output };
            return Some(Sniffed { what, remedy });
        }
    }
    let name = name.unwrap_or_else(|| "FILE".to_owned());
    if start.starts_with(b"PAR1") {
        let remedy = format!(
            "Make each row a line such as {PICTURE_OF_A_LINE}, for example from a column named prompt: python3 -c 'import pandas, sys; \
             pandas.read_parquet(sys.argv[1])[[\"prompt\"]].to_json(\"requests.jsonl\", \
             orient=\"records\", lines=True)' {name}"
        );
        return Some(Sniffed { what: "a Parquet file", remedy: Remedy::Words(remedy) });
    }
    if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
        let remedy = format!("Convert it: iconv -f UTF-16 -t UTF-8 {name} > requests.jsonl");
        let what = "text in UTF-16, not in UTF-8";
        return Some(Sniffed { what, remedy: Remedy::Words(remedy) });
    }
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let first = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii_end();
    if text.starts_with(b"[") {
        let remedy =
            format!("Write each item on a line of its own: jq -c '.[]' {name} > requests.jsonl");
        let what = "a JSON array, not lines of JSON objects";
        return Some(Sniffed { what, remedy: Remedy::Words(remedy) });
    }
    if first == b"{" && text.len() > first.len() {
        let remedy = format!("Write each object on one line: jq -c . {name} > requests.jsonl");
        let what = "JSON spread over several lines";
        return Some(Sniffed { what, remedy: Remedy::Words(remedy) });
    }
    let ending = path.and_then(|path| path.extension()?.to_str());
    let delimiter = delimiter(first).or_else(|| match ending {
        _ if first.is_empty() || first.starts_with(b"{") => None,
        Some("csv") => Some(b','),
        Some("tsv") => Some(b'\t'),
        _ => None,
    })?;
    let what = if delimiter == b'\t' { "a table (TSV)" } else { "a table (CSV)" };
    let delimiter = if delimiter == b'\t' { ", delimiter=\"\\t\"" } else { "" };
    let remedy = format!(
        "Make each row a line such as {PICTURE_OF_A_LINE}, for example from a column named prompt: \
         python3 -c 'import csv, json, sys; [print(json.dumps({{\"prompt\": row[\"prompt\"]}})) \
         for row in csv.DictReader(sys.stdin{delimiter})]' < {name} > requests.jsonl"
    );
    Some(Sniffed { what, remedy: Remedy::Words(remedy) })
}

/// What separates the columns of a table whose first line has their names.
fn delimiter(header: &[u8]) -> Option<u8> {
    let header = std::str::from_utf8(header).ok()?;
    [b'\t', b','].into_iter().find(|delimiter| {
        let mut names = header.split(char::from(*delimiter)).map(|name| name.trim_matches('"'));
        let plain = |c: char| c.is_alphanumeric() || "_- .()#".contains(c);
        names.clone().count() > 1 && names.all(|name| name.len() <= 64 && name.chars().all(plain))
    })
}

/// Where results of an unpacked file would go: `big.jsonl.gz` gives `big.out.jsonl`.
fn unpacked_output(path: &Path) -> String {
    let stem = path.with_extension("");
    let stem = if stem.extension().is_some_and(|ending| ending == "jsonl") {
        stem.with_extension("")
    } else {
        stem
    };
    let mut output = stem.into_os_string();
    output.push(".out.jsonl");
    shell_quoted(Path::new(&output))
}

/// A path, or another argument of a command, as a shell takes it.
pub fn shell_quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=@:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// An input that is an address and not a file: what it is, and what to do.
pub(crate) fn sniff_address(path: &Path) -> Option<Sniffed> {
    let address = path.to_str()?;
    let (scheme, rest) = address.split_once("://")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    if scheme.is_empty() || rest.is_empty() || !scheme.chars().all(plain) {
        return None;
    }
    let command = match scheme {
        "s3" => format!("aws s3 cp {address} -"),
        "gs" => format!("gcloud storage cat {address}"),
        _ => format!("curl -fsSL {address}"),
    };
    let remedy = Remedy::Pipe { purpose: "Fetch it", command, output: "out.jsonl".to_owned() };
    Some(Sniffed { what: "an address, not a file", remedy })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(start: &[u8], expected: Option<(&str, &str)>) {
        let sniffed = sniff(start, Some(Path::new("d/big.jsonl.x")));
        match (&sniffed, expected) {
            (None, None) => {}
            (Some(sniffed), Some((what, part))) => {
                assert_eq!(sniffed.what, what);
                assert!(sniffed.remedy.to_string().contains(part), "{}", sniffed.remedy);
            }
            _ => panic!("{:?}", String::from_utf8_lossy(start)),
        }
    }

    #[test]
    fn what_is_not_lines_of_json_is_known_by_its_beginning() {
        let unpack = "cat d/big.jsonl.x | glinthawk run - -o d/big.out.jsonl";
        check(b"\x1f\x8b\x08\x00", Some(("compressed with gzip", unpack)));
        check(b"\x28\xb5\x2f\xfd\x24", Some(("compressed with zstd", unpack)));
        check(b"PK\x03\x04\x14", Some(("a zip archive", "unzip -p d/big.jsonl.x")));
        check(b"PAR1\x15", Some(("a Parquet file", "read_parquet")));
        check(b"\xff\xfe{\0", Some(("text in UTF-16, not in UTF-8", "iconv")));
        let array = "a JSON array, not lines of JSON objects";
        check(b"\n  [\n {\"prompt\":\"a\"}\n]", Some((array, "jq -c '.[]'")));
        check(b"{\n  \"prompt\": \"a\"\n}\n", Some(("JSON spread over several lines", "jq -c .")));
        check(b"id,prompt\n1,\"hi\"\n", Some(("a table (CSV)", "DictReader(sys.stdin)")));
        check(b"\xef\xbb\xbf\"id\",\"prompt text\"\r\n", Some(("a table (CSV)", "csv")));
        check(b"id\tprompt\n1\thi\n", Some(("a table (TSV)", "delimiter=\"\\t\"")));
        // Lines of JSON, even bad ones, are left to the job.
        for lines in
            ["", "\n\n", "{", "{\"prompt\":\"a\"}\n[1]\n", "not JSON\n", "\"a\": 1, \"b\": 2\n"]
        {
            check(lines.as_bytes(), None);
        }
    }

    #[test]
    fn an_ending_tells_only_where_the_beginning_does_not() {
        let what = |start: &str, name: &str| {
            sniff(start.as_bytes(), Some(Path::new(name))).map(|sniffed| sniffed.what)
        };
        assert_eq!(what("What is it?\nNothing.\n", "a.csv"), Some("a table (CSV)"));
        assert_eq!(what("What is it?\nNothing.\n", "a.tsv"), Some("a table (TSV)"));
        assert_eq!(what("What is it?\nNothing.\n", "a.txt"), None);
        assert_eq!(what("{\"prompt\":\"a\"}\n", "a.csv"), None);
        assert_eq!(what("", "a.csv"), None);
    }

    #[test]
    fn addresses_are_known() {
        for (address, part) in [
            ("https://host/a.jsonl", Some("curl -fsSL https://host/a.jsonl | glinthawk run -")),
            ("s3://bucket/a.jsonl", Some("aws s3 cp s3://bucket/a.jsonl - |")),
            ("gs://bucket/a", Some("gcloud")),
            ("a.jsonl", None),
            ("://", None),
            ("dir with space://a", None),
        ] {
            let remedy =
                sniff_address(Path::new(address)).map(|sniffed| sniffed.remedy.to_string());
            assert_eq!(remedy.is_some(), part.is_some(), "{address}");
            assert!(remedy.unwrap_or_default().contains(part.unwrap_or_default()), "{address}");
        }
    }
}
