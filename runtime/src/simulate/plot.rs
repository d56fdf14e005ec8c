//! Lines of recompute cost against tier size, as SVG.

use plotters::prelude::*;

/// One policy's points: tier size in chunks, share of the no-cache cost that was computed again.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

const SIZE: (u32, u32) = (900, 560);
const COLOURS: [RGBColor; 7] = [
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(23, 190, 207),
];

pub(super) fn draw(title: &str, x_label: &str, series: &[Series]) -> Result<String, String> {
    let mut svg = String::new();
    draw_into(&mut svg, title, x_label, series).map_err(|error| error.to_string())?;
    Ok(svg)
}

fn draw_into(
    svg: &mut String,
    title: &str,
    x_label: &str,
    series: &[Series],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let points = || series.iter().flat_map(|s| s.points.iter().copied());
    let (x_low, x_high) = points().fold((f64::MAX, f64::MIN), |(low, high), (x, _)| (low.min(x), high.max(x)));
    let y_high = points().fold(0.01, |high: f64, (_, y)| high.max(y)) * 1.05;
    // One size alone still needs an axis with a length.
    let x_high = if x_high > x_low { x_high } else { x_low + 1.0 };
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x_low..x_high, 0.0..y_high)?;
    chart.configure_mesh().x_desc(x_label).y_desc("recompute cost / cost without a cache").draw()?;
    for (index, line) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), style))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    drop(chart);
    Ok(())
}
