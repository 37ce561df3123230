//! A number or a statement of the paper beside ours, and tables of them as text and as Markdown.

use std::fmt::Write;

/// How much a comparison proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Follows from formulas and shapes alone.
    Arithmetic,
    /// The kernels were fitted to it: it agrees because it was made to.
    Anchor,
    /// Follows from anchors in the way that is named, so it tests nothing new.
    Follows(&'static str),
    /// Neither: a test.
    HeldOut(Test),
}

/// What kind of number a test is about; each kind is counted by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// A throughput, a ratio of throughputs or a kernel's time.
    Rate,
    /// A whole number of flights. A wide range rounds up to each, so agreement says little.
    Flights,
    /// A batch that a search picks.
    Batch,
}

impl Standing {
    /// The standing in words.
    pub fn words(self) -> String {
        match self {
            Self::Arithmetic => "arithmetic".to_owned(),
            Self::Anchor => "anchor".to_owned(),
            Self::Follows(how) => format!("follows: {how}"),
            Self::HeldOut(Test::Flights) => "held out, rounded up".to_owned(),
            Self::HeldOut(_) => "held out".to_owned(),
        }
    }
}

/// One number of the paper and ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// What it is.
    pub what: String,
    /// The paper's value.
    pub paper: f64,
    /// Ours.
    pub ours: f64,
    /// Digits after the point in tables.
    pub digits: usize,
    /// Unit, after the number.
    pub unit: &'static str,
    /// How much it proves.
    pub standing: Standing,
}

impl Comparison {
    pub(crate) fn new(
        what: impl Into<String>,
        paper: f64,
        ours: f64,
        digits: usize,
        unit: &'static str,
        standing: Standing,
    ) -> Self {
        Self { what: what.into(), paper, ours, digits, unit, standing }
    }

    /// A ratio, to one digit.
    pub(crate) fn ratio(what: &str, paper: f64, ours: f64, standing: Standing) -> Self {
        Self::new(what, paper, ours, 1, "×", standing)
    }

    /// Ours over theirs, less one.
    pub fn error(&self) -> f64 {
        self.ours / self.paper - 1.0
    }

    /// Within 10%, the mark for what is held out.
    pub fn within_mark(&self) -> bool {
        self.error().abs() <= 0.10
    }

    /// Theirs, ours and the error, as the page prints them.
    pub(crate) fn numbers(&self) -> [String; 3] {
        let (digits, unit) = (self.digits, self.unit);
        let number = |value: f64| format!("{value:.digits$}{unit}");
        // What rounds to the digits the paper gives is equal to it.
        let same = number(self.paper) == number(self.ours);
        let error = if same { "0%".to_owned() } else { format!("{:+.1}%", 100.0 * self.error()) };
        [number(self.paper), number(self.ours), error]
    }
}

/// Something the paper says without a number, and what we find.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// The paper's claim.
    pub claim: &'static str,
    /// What we find.
    pub ours: String,
    /// Whether it holds: in every case looked at, in some, in none, or whether nothing here can tell.
    pub holds: &'static str,
}

impl Statement {
    /// A claim, checked in several cases; in none where nothing here can check it.
    pub(crate) fn new(claim: &'static str, ours: String, cases: &[bool]) -> Self {
        let (all, any) = (cases.iter().all(|&case| case), cases.iter().any(|&case| case));
        let holds = match (cases.is_empty(), all, any) {
            (true, ..) => "not testable here",
            (false, true, _) => "holds",
            (false, false, true) => "in part",
            (false, false, false) => "does not hold",
        };
        Self { claim, ours, holds }
    }

    pub(crate) fn cells(&self) -> Vec<String> {
        vec![self.claim.to_owned(), self.ours.clone(), self.holds.to_owned()]
    }
}

/// A part of the paper: its label, its numbers, what is to be said about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// The LaTeX label, or several; empty if the section is about no one part.
    pub label: &'static str,
    /// A heading.
    pub title: &'static str,
    /// The numbers.
    pub comparisons: Vec<Comparison>,
    /// What the text says without a number.
    pub statements: Vec<Statement>,
    /// Further tables: a header and its rows.
    pub tables: Vec<Table>,
    /// Paragraphs: what was assumed, why something differs.
    pub notes: Vec<String>,
    /// File names of its plots, and what they show.
    pub figures: Vec<(&'static str, &'static str)>,
}

/// A plain table.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Column heads.
    pub header: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

impl Section {
    fn as_tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        if !self.comparisons.is_empty() {
            let row = |comparison: &Comparison| {
                let mut cells = vec![comparison.what.clone()];
                cells.extend(comparison.numbers());
                cells.push(comparison.standing.words());
                cells
            };
            let header = ["quantity", "paper", "ours", "error", "standing"];
            tables.push(Table::new(&header, self.comparisons.iter().map(row).collect()));
        }
        if !self.statements.is_empty() {
            let rows = self.statements.iter().map(Statement::cells).collect();
            tables.push(Table::new(&["the paper says", "we find", "verdict"], rows));
        }
        tables.extend(self.tables.iter().cloned());
        tables
    }

    /// The section for a terminal.
    pub fn render(&self) -> String {
        let label =
            if self.label.is_empty() { String::new() } else { format!(" ({})", self.label) };
        let mut text = format!("{}{label}\n", self.title);
        for table in self.as_tables() {
            text.push_str(&table.render());
        }
        for note in &self.notes {
            writeln!(text, "  {note}").expect("writing to a string does not fail");
        }
        text
    }

    /// The section as Markdown under a heading of `level`; plots lie in `folder`.
    pub fn markdown(&self, level: usize, folder: &str) -> String {
        let mut text = format!("{} {}\n\n", "#".repeat(level), self.title);
        if !self.label.is_empty() {
            text.push_str(&format!("`{}`\n\n", self.label.replace(", ", "`, `")));
        }
        for table in self.as_tables() {
            text.push_str(&table.markdown());
            text.push('\n');
        }
        for note in &self.notes {
            writeln!(text, "{note}\n").expect("writing to a string does not fail");
        }
        for (file, shows) in &self.figures {
            writeln!(text, "![{shows}]({folder}/{file}.svg)\n")
                .expect("writing to a string does not fail");
        }
        text
    }
}

impl Table {
    pub(crate) fn new(header: &[&str], rows: Vec<Vec<String>>) -> Self {
        Self { header: header.iter().map(|&cell| cell.to_owned()).collect(), rows }
    }

    pub(crate) fn render(&self) -> String {
        let columns = self.header.len();
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let cells = self.rows.iter().map(|row| row[column].chars().count());
                cells.chain([self.header[column].chars().count()]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            format!("  {}\n", padded.collect::<Vec<_>>().join("  ").trim_end())
        };
        std::iter::once(&self.header).chain(&self.rows).map(|cells| line(cells)).collect()
    }

    pub(crate) fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|{}\n", "---|".repeat(self.header.len()));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!("{}{rule}{rows}", line(&self.header))
    }
}
