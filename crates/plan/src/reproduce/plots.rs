//! The kinds of charts the reproduction draws, as SVG; which data they show is said in `figures`.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::PlanError;

const SIZE: (u32, u32) = (720, 420);
const FONT: &str = "sans-serif";
pub(super) const INK: RGBColor = RGBColor(40, 44, 52);
pub(super) const GRID: RGBColor = RGBColor(224, 227, 232);
pub(super) const OURS: RGBColor = RGBColor(31, 96, 168);
pub(super) const THEIRS: RGBColor = RGBColor(226, 132, 38);
pub(super) const THIRD: RGBColor = RGBColor(120, 168, 96);
pub(super) const FOURTH: RGBColor = RGBColor(160, 166, 176);

pub(super) type Drawn = Result<(), Box<dyn std::error::Error>>;
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes one plot into `folder`.
pub(super) fn plot(
    folder: &Path,
    name: &str,
    draw: impl FnOnce(&Area) -> Drawn,
) -> Result<(), PlanError> {
    let failed = |message: String| PlanError::Plot { name: name.to_owned(), message };
    let path = folder.join(format!("{name}.svg"));
    let area = SVGBackend::new(&path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
    draw(&area).map_err(|error| failed(error.to_string()))?;
    area.present().map_err(|error| failed(error.to_string()))
}

pub(super) fn text(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&INK)
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
            for point in points {
                let (x, y) = chart.backend_coord(&at(point));
                area.draw(&Text::new(point.2.clone(), (x, y + 9), centred(12, VPos::Top)))?;
            }
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
