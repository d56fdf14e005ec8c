//! The two orders in which the rows of Q and K are stored.

use keepsake_kernels::RopeStyle;

use super::Tensor;

/// Brings a [heads * head_dim, k] matrix to [`RopeStyle::HalfSplit`], the one order that models are
/// run in, so that the same weights give the same bits from either kind of file. Whole rows move:
/// quantised blocks stay as they are.
pub(crate) fn to_half_split(style: RopeStyle, tensor: Tensor<'_>, head_dim: usize) -> Tensor<'_> {
    if style == RopeStyle::HalfSplit {
        return tensor;
    }
    let num_rows = tensor.shape[0];
    let row_bytes = tensor.bytes.len() / num_rows;
    let half = head_dim / 2;
    let mut bytes = Vec::with_capacity(tensor.bytes.len());
    for row in 0..num_rows {
        let (head, channel) = (row / head_dim, row % head_dim);
        let source_channel = 2 * (channel % half) + channel / half;
        let source = (head * head_dim + source_channel) * row_bytes;
        bytes.extend_from_slice(&tensor.bytes[source..source + row_bytes]);
    }
    Tensor { bytes: bytes.into(), ..tensor }
}
