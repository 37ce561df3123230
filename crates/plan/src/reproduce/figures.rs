//! The reproduction's figures: which numbers go into which chart.

use std::path::Path;

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::PlanError;

use super::comparison::Standing;
use super::plots::{
    Bars, FOURTH, GRID, INK, LinePoint, Lines, OURS, THEIRS, THIRD, centred, plot, text, whole,
};
use super::sweeps::{LatencyPoint, LengthPoint, Pairing};
use super::throughput::{CostPoint, EndToEnd, TrafficRow};

/// fig:e2e_thr.
pub(crate) fn end_to_end(folder: &Path, runs: &EndToEnd) -> Result<(), PlanError> {
    let rates = runs.reports.iter().map(|report| report.tokens_per_second).collect();
    // The paper states the single tier as a ratio only.
    let paper = vec![1992.0 / 5.9, 1138.0, 1557.0, 1992.0];
    let labels = ["16 T4", "+ 16 CPU", "+ 32 CPU", "+ 48 CPU"].map(str::to_owned).to_vec();
    let series = vec![("paper", THEIRS, paper), ("simulated", OURS, rates)];
    let bars = Bars {
        title: "Throughput on 16 T4",
        unit: "tokens/s",
        labels,
        series,
        digits: 0,
        headroom: 1.18,
    };
    plot(folder, "e2e_thr", |area| bars.draw(area))
}

/// fig:e2e_tot_breakdown: a stack per configuration.
pub(crate) fn time_per_token(folder: &Path, runs: &EndToEnd) -> Result<(), PlanError> {
    let labels = ["16 T4", "+ 16 CPU", "+ 32 CPU", "+ 48 CPU"];
    plot(folder, "e2e_tot", |area| {
        let highest =
            runs.reports.iter().map(|report| report.time_per_token.total()).fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption("Time per token on 16 T4, simulated", text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..labels.len() as f64, 0.0..highest * 1.12)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .x_labels(0)
            .y_desc("seconds")
            .y_label_formatter(&whole)
            .axis_style(INK.mix(0.6));
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        let parts: [(&str, RGBColor); 4] = [
            ("Tier-1 compute", OURS),
            ("Tier-2 compute", THIRD),
            ("network", THEIRS),
            ("queueing", FOURTH),
        ];
        for (part, (name, colour)) in parts.into_iter().enumerate() {
            let boxes = runs.reports.iter().enumerate().map(|(index, report)| {
                let time = &report.time_per_token;
                let values = [time.tier1_compute, time.tier2_compute, time.network, time.queueing];
                let bottom: f64 = values[..part].iter().sum();
                let x = index as f64;
                Rectangle::new(
                    [(x + 0.22, bottom), (x + 0.78, bottom + values[part])],
                    colour.filled(),
                )
            });
            chart.draw_series(boxes)?.label(name).legend(move |(x, y)| {
                Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled())
            });
        }
        for (index, report) in runs.reports.iter().enumerate() {
            let time = &report.time_per_token;
            let words = format!(
                "{:.2} s, {:.0}% pending",
                time.total(),
                100.0 * time.pending() / time.total()
            );
            let above = (index as f64 + 0.5, time.total() + highest * 0.015);
            chart.draw_series([Text::new(words, above, centred(12, VPos::Bottom))])?;
            let (x, y) = chart.backend_coord(&(index as f64 + 0.5, -highest * 0.03));
            area.draw(&Text::new(labels[index], (x, y), centred(13, VPos::Top)))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .label_font(text(13))
            .margin(8)
            .draw()?;
        Ok(())
    })
}

/// table:inter_bw: ours against theirs.
pub(crate) fn traffic(folder: &Path, rows: &[TrafficRow]) -> Result<(), PlanError> {
    // Where each label stands from its point, in the table's order, so that none covers another.
    const PLACES: [(i32, i32, HPos); 7] = [
        (2, 16, HPos::Left),
        (-10, -10, HPos::Right),
        (10, 10, HPos::Left),
        (-10, -6, HPos::Right),
        (-10, -12, HPos::Right),
        (10, 10, HPos::Left),
        (-10, -4, HPos::Right),
    ];
    plot(folder, "inter_bw", |area| {
        let (lowest, highest) = (900.0, 2700.0);
        let mut chart = ChartBuilder::on(area)
            .caption("table:inter_bw, tokens/s: simulated against the paper", text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(lowest..highest, lowest..highest)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("paper").y_desc("simulated").axis_style(INK.mix(0.6)).bold_line_style(GRID);
        mesh.x_label_formatter(&whole).y_label_formatter(&whole);
        mesh.light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        chart.draw_series(LineSeries::new([(lowest, lowest), (highest, highest)], INK.mix(0.7)))?;
        for line in [
            [(lowest, lowest * 1.1), (highest / 1.1, highest)],
            [(lowest / 0.9, lowest), (highest, highest * 0.9)],
        ] {
            chart.draw_series([DashedPathElement::new(line.to_vec(), 5, 5, INK.mix(0.4))])?;
        }
        for (anchor, name, colour) in [(true, "anchor", FOURTH), (false, "held out", OURS)] {
            let chosen = rows.iter().filter(|row| (row.standing == Standing::Anchor) == anchor);
            let dots = chosen
                .map(|row| Circle::new((row.paper[0], row.tokens_per_second), 5, colour.filled()));
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 6, y), 5, colour.filled()));
        }
        for (row, (right, down, side)) in rows.iter().zip(PLACES) {
            let (x, y) = chart.backend_coord(&(row.paper[0], row.tokens_per_second));
            let style = text(12).pos(Pos::new(side, VPos::Center));
            area.draw(&Text::new(row.name, (x + right, y + down), style))?;
        }
        let (x, y) = chart.backend_coord(&(2550.0, 2200.0));
        area.draw(&Text::new("±10%", (x, y), text(12)))?;
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .label_font(text(13))
            .margin(12)
            .draw()?;
        Ok(())
    })
}

/// fig:motivate_example.
pub(crate) fn motivation(folder: &Path, points: &[CostPoint]) -> Result<(), PlanError> {
    plot(folder, "motivate_example", |area| {
        let (cost, rate) = points.iter().fold((0.0f64, 0.0f64), |(cost, rate), point| {
            (cost.max(point.cost), rate.max(point.tokens_per_second))
        });
        let mut chart = ChartBuilder::on(area)
            .caption("Throughput against cost, simulated", text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..cost / 1e3 * 1.05, 0.0..rate * 1.12)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("equipment, thousand dollars").y_desc("tokens/s").axis_style(INK.mix(0.6));
        mesh.x_label_formatter(&whole).y_label_formatter(&whole);
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        for (name, two_tier, colour) in
            [("T4 + CPU, two tiers", true, OURS), ("T4 alone", false, THEIRS)]
        {
            let chosen = || points.iter().filter(move |point| (point.tier2 > 0) == two_tier);
            let dots = chosen().map(|point| {
                Circle::new((point.cost / 1e3, point.tokens_per_second), 5, colour.filled())
            });
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 6, y), 5, colour.filled()));
            for point in chosen() {
                let words = match point.tier2 {
                    0 => format!("{}", point.tier1),
                    each => format!("{}+{}", point.tier1, point.tier1 * each),
                };
                let (x, y) = chart.backend_coord(&(point.cost / 1e3, point.tokens_per_second));
                let (right, side) = if two_tier { (-8, HPos::Right) } else { (8, HPos::Left) };
                let style = text(12).pos(Pos::new(side, VPos::Center));
                area.draw(&Text::new(words, (x + right, y), style))?;
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .label_font(text(13))
            .margin(12)
            .draw()?;
        Ok(())
    })
}

/// fig:alt_thr and fig:alt_cost.
pub(crate) fn alternatives(folder: &Path, pairings: &[Pairing]) -> Result<(), PlanError> {
    let labels: Vec<String> = pairings.iter().map(|pairing| pairing.name.to_owned()).collect();
    let rates = |pick: &dyn Fn(&Pairing) -> f64| pairings.iter().map(pick).collect::<Vec<f64>>();
    let series = vec![
        ("two tiers", OURS, rates(&|pairing| pairing.together)),
        ("Tier 1 alone", THEIRS, rates(&|pairing| pairing.tier1_alone)),
        ("Tier 2 alone", FOURTH, rates(&|pairing| pairing.tier2_alone)),
    ];
    let bars = Bars {
        title: "Pairings: throughput, simulated",
        unit: "tokens/s",
        labels: labels.clone(),
        series,
        digits: 0,
        headroom: 1.4,
    };
    plot(folder, "alt_thr", |area| bars.draw(area))?;
    let cost = |price: f64, rate: f64| if rate > 0.0 { price / rate } else { 0.0 };
    let series = vec![
        ("two tiers", OURS, rates(&|pairing| cost(pairing.prices[0], pairing.together))),
        ("Tier 1 alone", THEIRS, rates(&|pairing| cost(pairing.prices[1], pairing.tier1_alone))),
        ("Tier 2 alone", FOURTH, rates(&|pairing| cost(pairing.prices[2], pairing.tier2_alone))),
    ];
    let bars = Bars {
        title: "Pairings: cost, simulated",
        unit: "dollars per token/s",
        labels,
        series,
        digits: 0,
        headroom: 1.4,
    };
    plot(folder, "alt_cost", |area| bars.draw(area))
}

/// fig:rtt_thr: the number below a point is the number of CPU nodes per T4.
pub(crate) fn latency(folder: &Path, points: &[LatencyPoint]) -> Result<(), PlanError> {
    let line = |keep: &dyn Fn(&LatencyPoint) -> bool| {
        let mut best: Vec<LinePoint> = Vec::new();
        for point in points.iter().filter(|point| point.induced_ms > 0.0 && keep(point)) {
            let entry = (point.induced_ms, 100.0 * point.share, point.tier2.to_string());
            match best.last_mut().filter(|last| last.0 == point.induced_ms) {
                Some(last) if last.1 < entry.1 => *last = entry,
                Some(_) => {}
                None => best.push(entry),
            }
        }
        best
    };
    let lines = Lines {
        title: "9 T4 under induced latency, simulated",
        x: (
            "induced round trip, ms (below a point: CPU nodes per T4)",
            1.7..240.0,
            vec![2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0],
        ),
        y: ("% of the throughput without", 115.0),
        series: vec![
            ("more Tier-2 nodes", OURS, line(&|_| true)),
            ("3 Tier-2 nodes per T4", THEIRS, line(&|point| point.tier2 == 3)),
        ],
        legend: SeriesLabelPosition::LowerLeft,
    };
    plot(folder, "rtt_thr", |area| lines.draw(area))
}

/// fig:seqlen_thr and fig:seqlen_cost: the number below a point is the number of CPU nodes per T4.
pub(crate) fn lengths(folder: &Path, points: &[LengthPoint]) -> Result<(), PlanError> {
    let line = |pick: &dyn Fn(&LengthPoint) -> f64, named: bool| {
        let words =
            |point: &LengthPoint| if named { point.tier2.to_string() } else { String::new() };
        points
            .iter()
            .map(|point| ((point.tokens / 1024) as f64, pick(point), words(point)))
            .collect::<Vec<_>>()
    };
    let x = || {
        (
            "context, thousand tokens (below a point: CPU nodes per T4)",
            1.8..18.0,
            vec![2.0, 4.0, 8.0, 16.0],
        )
    };
    let lines = Lines {
        title: "Throughput per T4 over sequence length, simulated",
        x: x(),
        y: ("tokens/s per T4", 115.0),
        series: vec![
            ("9 T4 + CPU", OURS, line(&|point| point.per_gpu[0], true)),
            ("80 T4", THEIRS, line(&|point| point.per_gpu[1], false)),
            ("16 T4", FOURTH, line(&|point| point.per_gpu[2], false)),
        ],
        legend: SeriesLabelPosition::UpperRight,
    };
    plot(folder, "seqlen_thr", |area| lines.draw(area))?;
    let lines = Lines {
        title: "Cost over sequence length, simulated",
        x: x(),
        y: (
            "dollars per token/s",
            1.1 * points.iter().map(|point| point.cost[2]).fold(0.0, f64::max),
        ),
        series: vec![
            ("9 T4 + CPU", OURS, line(&|point| point.cost[0], true)),
            ("80 T4", THEIRS, line(&|point| point.cost[1], false)),
            ("16 T4", FOURTH, line(&|point| point.cost[2], false)),
        ],
        legend: SeriesLabelPosition::UpperLeft,
    };
    plot(folder, "seqlen_cost", |area| lines.draw(area))
}
