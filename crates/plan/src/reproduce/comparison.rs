//! A number of the paper beside ours, and tables of them as text and as Markdown.

use std::fmt::Write;

/// What a comparison is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Follows from formulas and shapes alone.
    Arithmetic,
    /// The calibration was fitted to it: it agrees because it was made to.
    Anchor,
    /// Tied to an anchor by arithmetic, so no test of the kernels.
    Linked,
    /// Neither fitted nor tied: a test.
    HeldOut,
}

impl Standing {
    /// The standing in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Arithmetic => "arithmetic",
            Self::Anchor => "anchor",
            Self::Linked => "linked",
            Self::HeldOut => "held out",
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
    /// What it is worth.
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

    /// Ours over theirs, less one.
    pub fn error(&self) -> f64 {
        self.ours / self.paper - 1.0
    }

    /// Within 10%, the mark for what is held out.
    pub fn within_mark(&self) -> bool {
        self.error().abs() <= 0.10
    }

    fn cells(&self) -> [String; 5] {
        let (digits, unit) = (self.digits, self.unit);
        let number = |value: f64| format!("{value:.digits$}{unit}");
        // What rounds to the digits the paper gives is equal to it.
        let same = number(self.paper) == number(self.ours);
        let error = if same { "0%".to_owned() } else { format!("{:+.1}%", 100.0 * self.error()) };
        let standing = self.standing.words().to_owned();
        [self.what.clone(), number(self.paper), number(self.ours), error, standing]
    }
}

/// A part of the paper: its label, its numbers, what is to be said about them.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// The LaTeX label, or several.
    pub label: &'static str,
    /// A heading.
    pub title: &'static str,
    /// The numbers.
    pub comparisons: Vec<Comparison>,
    /// Further tables: a header and its rows.
    pub tables: Vec<Table>,
    /// Paragraphs: what was assumed, why something differs.
    pub notes: Vec<String>,
    /// File names of its plots.
    pub figures: Vec<&'static str>,
}

/// A plain table.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Column heads.
    pub header: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

const HEADER: [&str; 5] = ["quantity", "paper", "ours", "error", "standing"];

impl Section {
    fn as_tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        if !self.comparisons.is_empty() {
            let rows =
                self.comparisons.iter().map(|comparison| comparison.cells().to_vec()).collect();
            tables.push(Table { header: HEADER.map(str::to_owned).to_vec(), rows });
        }
        tables.extend(self.tables.iter().cloned());
        tables
    }

    /// The section for a terminal.
    pub fn render(&self) -> String {
        let mut text = format!("{} ({})\n", self.title, self.label);
        for table in self.as_tables() {
            text.push_str(&table.render());
        }
        for note in &self.notes {
            writeln!(text, "  {note}").expect("writing to a string does not fail");
        }
        text
    }

    /// The section as Markdown; plots lie in `folder`.
    pub fn markdown(&self, folder: &str) -> String {
        let mut text = format!("## {}\n\n`{}`\n\n", self.title, self.label.replace(", ", "`, `"));
        for table in self.as_tables() {
            text.push_str(&table.markdown());
            text.push('\n');
        }
        for note in &self.notes {
            writeln!(text, "{note}\n").expect("writing to a string does not fail");
        }
        for figure in &self.figures {
            writeln!(text, "![{}]({folder}/{figure}.svg)\n", self.title)
                .expect("writing to a string does not fail");
        }
        text
    }
}

impl Table {
    pub(crate) fn new(header: &[&str], rows: Vec<Vec<String>>) -> Self {
        Self { header: header.iter().map(|&cell| cell.to_owned()).collect(), rows }
    }

    fn render(&self) -> String {
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

    fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|{}\n", "---|".repeat(self.header.len()));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!("{}{rule}{rows}", line(&self.header))
    }
}
