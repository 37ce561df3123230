//! The kinds of charts the reproduction draws, as SVG; which data they show is said in `figures`.

use crate::error::ReproduceError;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (720, 420);
const FONT: &str = "sans-serif";
const PAPER: RGBColor = RGBColor(255, 255, 255);
pub(super) const INK: RGBColor = RGBColor(40, 44, 52);
pub(super) const GRID: RGBColor = RGBColor(224, 227, 232);
pub(super) const OURS: RGBColor = RGBColor(31, 96, 168);
pub(super) const THEIRS: RGBColor = RGBColor(226, 132, 38);
pub(super) const THIRD: RGBColor = RGBColor(120, 168, 96);
pub(super) const FOURTH: RGBColor = RGBColor(160, 166, 176);

/// Colours where the reader prefers a dark page. Background and text change together, so text is legible either way.
const DARK: [(RGBColor, &str); 7] = [
    (PAPER, "#161B22"),
    (INK, "#E6EAF0"),
    (GRID, "#30363D"),
    (OURS, "#5AA2EE"),
    (THEIRS, "#F0A050"),
    (THIRD, "#8FC477"),
    (FOURTH, "#8B94A1"),
];

pub(super) type Drawn = Result<(), Box<dyn std::error::Error>>;
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A plot's name and its SVG.
pub(super) type Picture = (&'static str, String);

/// Draws one plot.
pub(super) fn plot(
    name: &'static str,
    draw: impl FnOnce(&Area) -> Drawn,
) -> Result<Picture, ReproduceError> {
    let failed = |message: String| ReproduceError::Plot { name: name.to_owned(), message };
    let mut picture = String::new();
    {
        let area = SVGBackend::with_string(&mut picture, SIZE).into_drawing_area();
        area.fill(&PAPER).map_err(|error| failed(error.to_string()))?;
        draw(&area).map_err(|error| failed(error.to_string()))?;
        area.present().map_err(|error| failed(error.to_string()))?;
    }
    let (opening, rest) =
        picture.split_once('\n').ok_or_else(|| failed("the SVG is empty".to_owned()))?;
    Ok((name, format!("{opening}\n{}\n{rest}", dark_style())))
}

/// A rule for every colour: style sheets go before the attributes that the plots are drawn with.
fn dark_style() -> String {
    let rule = |(light, dark): &(RGBColor, &str)| {
        let RGBColor(red, green, blue) = light;
        let light = format!("#{red:02X}{green:02X}{blue:02X}");
        format!("[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}")
    };
    let rules: String = DARK.iter().map(rule).collect();
    format!("<style>@media (prefers-color-scheme: dark){{{rules}}}</style>")
}

pub(super) fn text(size: u32) -> TextStyle<'static> {
    // The backend divides sizes by 1.24.
    (FONT, f64::from(size) * 1.24).into_font().color(&INK)
}

/// Where words stand from their point, if there is room.
#[derive(Clone, Copy)]
pub(super) enum Side {
    UpperLeft,
    LowerRight,
    Below,
}

/// Words beside the points of a chart, in pixels, that cover neither each other nor a point.
pub(super) struct Labels {
    points: Vec<(i32, i32)>,
    /// The x axis, which words do not cross.
    floor: i32,
    placed: Vec<[i32; 4]>,
}

impl Labels {
    const TEXT: i32 = 12;

    pub fn new(points: Vec<(i32, i32)>, floor: i32) -> Self {
        Self { points, floor, placed: Vec::new() }
    }

    /// A box (left, top, right, bottom) for words beside a point: the first free one, `side` before all others.
    fn place(&mut self, (x, y): (i32, i32), words: &str, side: Side) -> [i32; 4] {
        let (width, height) = (words.chars().count() as i32 * Self::TEXT * 6 / 10, Self::TEXT);
        // The first three in the order of `Side`.
        let mut tries = [
            (-6 - width, -10),
            (6, 10),
            (-width / 2, 14),
            (-9 - width, 0),
            (9, 0),
            (-width / 2, -14),
            (6, -10),
            (-6 - width, 10),
            (9, 22),
            (-9 - width, -22),
        ];
        tries[..=side as usize].rotate_right(1);
        let boxes = tries.map(|(right, down)| {
            let (left, middle) = (x + right, y + down);
            [left, middle - height / 2, left + width, middle + height / 2]
        });
        let free = boxes.iter().find(|one| !self.covers(one)).unwrap_or(&boxes[0]);
        self.placed.push(*free);
        *free
    }

    fn covers(&self, [left, top, right, bottom]: &[i32; 4]) -> bool {
        let dots = self.points.iter().map(|&(x, y)| [x - 6, y - 6, x + 6, y + 6]);
        let over = |[l, t, r, b]: [i32; 4]| *left < r && l < *right && *top < b && t < *bottom;
        *bottom > self.floor || dots.chain(self.placed.iter().copied()).any(over)
    }

    /// Writes words beside a point.
    pub fn write(&mut self, area: &Area, at: (i32, i32), words: &str, side: Side) -> Drawn {
        let [x, top, _, bottom] = self.place(at, words, side);
        let style = text(Self::TEXT as u32).pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(words.to_owned(), (x, (top + bottom) / 2), style))?;
        Ok(())
    }
}

/// Axis labels without a fraction.
pub(super) fn whole(value: &f64) -> String {
    format!("{value:.0}")
}

pub(super) fn centred(size: u32, vertical: VPos) -> TextStyle<'static> {
    text(size).pos(Pos::new(HPos::Center, vertical))
}

/// Groups of bars side by side, each group one label, each series one colour; values stand on the bars.
pub(super) struct Bars<'a> {
    pub title: &'a str,
    pub unit: &'a str,
    pub labels: Vec<String>,
    pub series: Vec<(&'a str, RGBColor, Vec<f64>)>,
    pub digits: usize,
    /// Height of the chart over its highest bar, so that the legend finds room.
    pub headroom: f64,
}

impl Bars<'_> {
    pub fn draw(&self, area: &Area) -> Drawn {
        let highest =
            self.series.iter().flat_map(|(_, _, values)| values).copied().fold(0.0, f64::max);
        let groups = self.labels.len();
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..groups as f64, 0.0..highest * self.headroom)?;
        let blank = |_: &f64| String::new();
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .x_labels(0)
            .x_label_formatter(&blank)
            .y_desc(self.unit)
            .y_label_formatter(&whole)
            .axis_style(INK.mix(0.6));
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        let width = 0.8 / self.series.len() as f64;
        for (index, (name, colour, values)) in self.series.iter().enumerate() {
            let left = |group: usize| group as f64 + 0.1 + index as f64 * width;
            let colour = *colour;
            let bars = values.iter().enumerate().map(|(group, &value)| {
                Rectangle::new(
                    [(left(group), 0.0), (left(group) + width * 0.94, value)],
                    colour.filled(),
                )
            });
            chart.draw_series(bars)?.label(*name).legend(move |(x, y)| {
                Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled())
            });
            let digits = self.digits;
            chart.draw_series(values.iter().enumerate().filter(|(_, value)| **value > 0.0).map(
                |(group, &value)| {
                    let at = (left(group) + width * 0.47, value + highest * 0.012);
                    Text::new(format!("{value:.digits$}"), at, centred(12, VPos::Bottom))
                },
            ))?;
        }
        let below = -highest * 0.03;
        for (group, label) in self.labels.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(group as f64 + 0.5, below));
            area.draw(&Text::new(label.clone(), (x, y), centred(13, VPos::Top)))?;
        }
        if self.series.len() > 1 {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .label_font(text(13))
                .margin(8)
                .draw()?;
        }
        Ok(())
    }
}

/// A point and the words below it.
pub(super) type LinePoint = (f64, f64, String);

/// A chart over a logarithmic x axis, with lines, points and words below them.
pub(super) struct Lines<'a> {
    pub title: &'a str,
    pub x: (&'a str, std::ops::Range<f64>, Vec<f64>),
    pub y: (&'a str, f64),
    pub series: Vec<(&'a str, RGBColor, Vec<LinePoint>)>,
    pub legend: SeriesLabelPosition,
}

impl Lines<'_> {
    pub fn draw(&self, area: &Area) -> Drawn {
        let (x_desc, x_range, keys) = &self.x;
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(
                x_range.clone().log_scale().with_key_points(keys.clone()),
                0.0..self.y.1,
            )?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(*x_desc)
            .y_desc(self.y.0)
            .axis_style(INK.mix(0.6))
            .x_label_formatter(&whole)
            .y_label_formatter(&whole);
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        for (name, colour, points) in &self.series {
            let (colour, at) = (*colour, |(x, y, _): &LinePoint| (*x, *y));
            chart
                .draw_series(LineSeries::new(points.iter().map(at), colour.stroke_width(2)))?
                .label(*name)
                .legend(move |(x, y)| Circle::new((x + 6, y), 5, colour.filled()));
            chart.draw_series(
                points.iter().map(|point| Circle::new(at(point), 5, colour.filled())),
            )?;
        }
        let pixels = |point: &LinePoint| chart.backend_coord(&(point.0, point.1));
        // Series that share a point share its words.
        let mut points: Vec<((i32, i32), &str)> = Vec::new();
        for point in self.series.iter().flat_map(|(_, _, points)| points) {
            let one = (pixels(point), point.2.as_str());
            if !points.contains(&one) {
                points.push(one);
            }
        }
        let floor = chart.backend_coord(&(x_range.start, 0.0)).1;
        let mut labels = Labels::new(points.iter().map(|&(at, _)| at).collect(), floor);
        for (at, words) in points.into_iter().filter(|(_, words)| !words.is_empty()) {
            labels.write(area, at, words, Side::Below)?;
        }
        chart
            .configure_series_labels()
            .position(self.legend.clone())
            .label_font(text(13))
            .margin(12)
            .draw()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_close_points_cover_neither_each_other_nor_a_point() {
        let points = vec![(200, 200), (213, 203), (207, 188), (195, 212), (220, 215)];
        let sides = [Side::UpperLeft, Side::LowerRight, Side::Below];
        for first in sides {
            let mut labels = Labels::new(points.clone(), 235);
            for &point in &points {
                let before =
                    Labels { placed: labels.placed.clone(), ..Labels::new(points.clone(), 235) };
                let own = labels.place(point, "16", first);
                assert!(!before.covers(&own), "{point:?}: {own:?}");
            }
        }
        let alone = |side| Labels::new(vec![(50, 50)], 99).place((50, 50), "16", side);
        assert_eq!(sides.map(|side| alone(side)[0]), [30, 56, 43]);
    }

    #[test]
    fn every_colour_of_a_plot_has_a_dark_one() {
        let (_, picture) = plot("test", |area| {
            for colour in [OURS, THEIRS, THIRD, FOURTH, INK, GRID] {
                area.draw(&Circle::new((9, 9), 5, colour.filled()))?;
            }
            Ok(())
        })
        .expect("drawn");
        let style = picture.lines().nth(1).expect("a style");
        for line in picture.lines().skip(2) {
            for part in line.split("fill=").skip(1) {
                let colour = part.split('"').nth(1).expect("quoted");
                assert!(style.contains(&format!("[fill=\"{colour}\"]")), "{colour} in {line}");
            }
        }
    }
}
