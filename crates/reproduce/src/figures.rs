//! The reproduction's figures: which numbers go into which chart.

use crate::calibration::{Anchors, Testbed};
use crate::comparison::Standing;
use crate::costs::{CostPoint, Pairing};
use crate::error::ReproduceError;
use crate::examples::gain;
use crate::plots::{
    Bars, FOURTH, GRID, INK, Labels, LinePoint, Lines, OURS, Picture, Side, THEIRS, THIRD, centred,
    plot, text, whole,
};
use crate::sweeps::{LatencyPoint, LengthPoint};
use crate::throughput::{EndToEnd, TrafficRow};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::VPos;

/// fig:llama2-70b-profile.
pub(crate) fn profile(testbed: &Testbed) -> Result<Picture, ReproduceError> {
    let t4 = testbed.kernels("t4");
    let rows: Vec<usize> = (0..=12).map(|power| 1 << power).collect();
    let points = rows.iter().map(|&rows| (rows as f64, gain(&t4, rows), String::new()));
    let lines = Lines {
        title: "Throughput of a T4's products, calibrated",
        x: ("batch, rows", 0.9..4600.0, vec![1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0]),
        y: ("times the throughput of batch 1", 80.0),
        series: vec![("one layer of Llama2-70B", OURS, points.collect())],
        legend: SeriesLabelPosition::UpperLeft,
    };
    plot("profile", |area| lines.draw(area))
}

/// fig:e2e_thr.
pub(crate) fn end_to_end(runs: &EndToEnd) -> Result<Picture, ReproduceError> {
    let rates = runs.reports.iter().map(|report| report.tokens_per_second).collect();
    // The paper states the single tier as a ratio only.
    let paper = vec![Anchors::T4_BOUND / 5.9, Anchors::CPU_BOUND, 1557.0, Anchors::T4_BOUND];
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
    plot("e2e_thr", |area| bars.draw(area))
}

/// fig:e2e_tot_breakdown: a stack per configuration.
pub(crate) fn time_per_token(runs: &EndToEnd) -> Result<Picture, ReproduceError> {
    let labels = ["16 T4", "+ 16 CPU", "+ 32 CPU", "+ 48 CPU"];
    plot("e2e_tot", |area| {
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
pub(crate) fn traffic(rows: &[TrafficRow]) -> Result<Picture, ReproduceError> {
    plot("inter_bw", |area| {
        let (lowest, highest) = (600.0, 2800.0);
        let mut chart = ChartBuilder::on(area)
            .caption("Throughput: simulated against the paper", text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(lowest..highest, lowest..highest)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("paper, tokens/s")
            .y_desc("simulated, tokens/s")
            .axis_style(INK.mix(0.6))
            .bold_line_style(GRID);
        mesh.x_label_formatter(&whole).y_label_formatter(&whole);
        mesh.light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        chart.draw_series(LineSeries::new([(lowest, lowest), (highest, highest)], INK.mix(0.7)))?;
        for line in [
            [(lowest, lowest * 1.1), (highest / 1.1, highest)],
            [(lowest / 0.9, lowest), (highest, highest * 0.9)],
        ] {
            chart.draw_series([DashedPathElement::new(line.to_vec(), 5, 5, INK.mix(0.4))])?;
        }
        // The standing's index in this list is `kind` below.
        let kinds = [("anchor", FOURTH), ("follows from anchors", THEIRS), ("held out", OURS)];
        let kind = |standing: Standing| match standing {
            Standing::Anchor => 0,
            Standing::Arithmetic | Standing::Follows(_) => 1,
            Standing::HeldOut(_) => 2,
        };
        for (index, (name, colour)) in kinds.into_iter().enumerate() {
            let dots = rows
                .iter()
                .filter(|row| kind(row.standing) == index)
                .map(|row| Circle::new((row.paper[0], row.tokens_per_second), 5, colour.filled()));
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 6, y), 5, colour.filled()));
        }
        let at = |row: &TrafficRow| chart.backend_coord(&(row.paper[0], row.tokens_per_second));
        let floor = chart.backend_coord(&(lowest, lowest)).1;
        let mut labels = Labels::new(rows.iter().map(at).collect(), floor);
        for (index, row) in rows.iter().enumerate() {
            let side = if index % 2 == 1 { Side::UpperLeft } else { Side::LowerRight };
            labels.write(area, at(row), row.name, side)?;
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
pub(crate) fn motivation(points: &[CostPoint]) -> Result<Picture, ReproduceError> {
    plot("motivate_example", |area| {
        let (cost, rate) = points.iter().fold((0.0f64, 0.0f64), |(cost, rate), point| {
            (cost.max(point.cost), rate.max(point.tokens_per_second))
        });
        let (cheapest, ticks) = (14.0, vec![20.0, 40.0, 60.0, 80.0, 120.0, 160.0]);
        let mut chart = ChartBuilder::on(area)
            .caption("Throughput against cost, simulated", text(18))
            .margin(12)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(
                (cheapest..cost / 1e3 * 1.1).log_scale().with_key_points(ticks),
                0.0..rate * 1.12,
            )?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("equipment, thousand dollars").y_desc("tokens/s").axis_style(INK.mix(0.6));
        mesh.x_label_formatter(&whole).y_label_formatter(&whole);
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).label_style(text(13)).draw()?;
        for (name, two_tier, colour) in
            [("two tiers: T4 + CPU nodes", true, OURS), ("single tier: T4", false, THEIRS)]
        {
            let chosen = points.iter().filter(|point| (point.tier2 > 0) == two_tier);
            let dots = chosen.map(|point| {
                Circle::new((point.cost / 1e3, point.tokens_per_second), 5, colour.filled())
            });
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 6, y), 5, colour.filled()));
        }
        let at =
            |point: &CostPoint| chart.backend_coord(&(point.cost / 1e3, point.tokens_per_second));
        let floor = chart.backend_coord(&(cheapest, 0.0)).1;
        let mut labels = Labels::new(points.iter().map(at).collect(), floor);
        for point in points {
            let (words, side) = match point.tier2 {
                0 => (point.tier1.to_string(), Side::Below),
                each => (format!("{} + {}", point.tier1, point.tier1 * each), Side::UpperLeft),
            };
            labels.write(area, at(point), &words, side)?;
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
pub(crate) fn alternatives(pairings: &[Pairing]) -> Result<[Picture; 2], ReproduceError> {
    let bars = |title, unit, values: [Vec<f64>; 3]| {
        let labels = pairings.iter().map(|pairing| pairing.name.to_owned()).collect();
        let [together, first, second] = values;
        let series = vec![
            ("two tiers", OURS, together),
            ("Tier 1 alone", THEIRS, first),
            ("Tier 2 alone", FOURTH, second),
        ];
        Bars { title, unit, labels, series, digits: 0, headroom: 1.4 }
    };
    let each = |pick: &dyn Fn(&Pairing) -> f64| pairings.iter().map(pick).collect::<Vec<f64>>();
    let rates = bars(
        "Throughput of pairs and of their parts, simulated",
        "tokens/s",
        [
            each(&|pairing| pairing.together),
            each(&|pairing| pairing.parts[0].rate()),
            each(&|pairing| pairing.parts[1].rate()),
        ],
    );
    let cost = |price: f64, rate: f64| if rate > 0.0 { price / rate } else { 0.0 };
    let costs = bars(
        "Cost of pairs and of their parts, simulated",
        "dollars per token/s",
        [
            each(&|pairing| cost(pairing.price(), pairing.together)),
            each(&|pairing| cost(pairing.parts[0].price, pairing.parts[0].rate())),
            each(&|pairing| cost(pairing.parts[1].price, pairing.parts[1].rate())),
        ],
    );
    Ok([plot("alt_thr", |area| rates.draw(area))?, plot("alt_cost", |area| costs.draw(area))?])
}

/// fig:rtt_thr: the number below a point is the number of CPU nodes per T4.
pub(crate) fn latency(points: &[LatencyPoint]) -> Result<Picture, ReproduceError> {
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
        title: "9 T4 under induced latency between the tiers, simulated",
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
    plot("rtt_thr", |area| lines.draw(area))
}

/// fig:seqlen_thr and fig:seqlen_cost: the number below a point is the number of CPU nodes per T4.
pub(crate) fn lengths(points: &[LengthPoint]) -> Result<[Picture; 2], ReproduceError> {
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
        title: "Throughput per T4 against the sequence length, simulated",
        x: x(),
        y: ("tokens/s per T4", 115.0),
        series: vec![
            ("9 T4 + CPU", OURS, line(&|point| point.per_gpu[0], true)),
            ("80 T4", THEIRS, line(&|point| point.per_gpu[1], false)),
            ("16 T4", FOURTH, line(&|point| point.per_gpu[2], false)),
        ],
        legend: SeriesLabelPosition::UpperRight,
    };
    let throughput = plot("seqlen_thr", |area| lines.draw(area))?;
    let lines = Lines {
        title: "Cost against the sequence length, simulated",
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
    Ok([throughput, plot("seqlen_cost", |area| lines.draw(area))?])
}
