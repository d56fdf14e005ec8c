//! The portable form: plain integer loops.

use super::{round_total, Task};
use crate::activations::{TILE_BYTES, TILE_K, TILE_ROWS};
use crate::cpu::panels::{code_at, PANEL};

pub(super) fn run(task: &Task, tiles: bool) {
    let (rows, k) = (task.x.rows(), task.panels.k);
    let format = task.panels.format;
    let mut weights = vec![0i64; k];
    for panel_index in task.first_panel..task.first_panel + task.num_panels {
        let panel = task.panels.panel(panel_index);
        for lane in 0..task.num_outputs(panel_index) {
            for (i, weight) in weights.iter_mut().enumerate() {
                let group = i / format.group_len * PANEL + lane;
                // SAFETY: element i < k and its group lie in the panel.
                unsafe {
                    let code = i64::from(code_at(panel.codes, format.bits, lane, i));
                    let scale = i64::from(*panel.scales.add(group));
                    let min =
                        format.bias.map_or_else(|| i64::from(*panel.mins.add(group)), |bias| -i64::from(bias) * scale);
                    *weight = scale * code + min;
                }
            }
            for row in 0..rows {
                let total: i64 =
                    weights.iter().enumerate().map(|(i, w)| w * i64::from(integer_at(task, tiles, row, i))).sum();
                // SAFETY: the row's scale, the output's step and place exist; the output is this task's.
                unsafe {
                    let value = round_total(total as f64) * *panel.steps.add(lane) * *task.x.scales().add(row);
                    let out = task.out.add(row * task.panels.n + panel_index * PANEL + lane);
                    *out = if task.add { *out + value } else { value };
                }
            }
        }
    }
}

fn integer_at(task: &Task, tiles: bool, row: usize, i: usize) -> i32 {
    let k_tiles = task.panels.k.div_ceil(TILE_K);
    // SAFETY: row and i lie below the activations' shape.
    unsafe {
        if tiles {
            let base =
                (row / TILE_ROWS * k_tiles + i / TILE_K) * 2 * TILE_BYTES + row % TILE_ROWS * TILE_K + i % TILE_K;
            let plane = task.x.integers::<i8>().add(base);
            256 * i32::from(*plane) + i32::from(*plane.add(TILE_BYTES))
        } else {
            let place = i / 4 * 4 + [0, 2, 1, 3][i % 4];
            i32::from(*task.x.integers::<i16>().add(row * k_tiles * TILE_K + place))
        }
    }
}
