//! Operators that move rows: prompt tokens into the token table, token ids to embeddings, chosen
//! rows to the head.

use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::error::Result;
use crate::plan::TokenTable;
use crate::tensor::{Index, Tensor};

/// `table[sequences + i] = prompt[i]` for every row of the bucket.
#[derive(Debug)]
pub struct WriteTokens<'a, D: Device> {
    /// `[tokens]`, [`crate::PlanView::prompt`].
    pub prompt: &'a Index<D>,
    /// The table.
    pub table: &'a mut TokenTable<D>,
}

impl<D: Device> WriteTokens<'_, D> {
    /// # Errors
    /// The bucket has more rows than the table.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("write_tokens");
        let tokens = self.prompt.tensor().dims()[0];
        let room = self.table.tensor().dims()[0] - self.table.sequences();
        check.that(tokens <= room, || format!("{tokens} tokens for {room} entries"))?;
        check.addresses("prompt", self.prompt, self.table.vocab())?;
        check.disjoint(&[("table", self.table.tensor())], &[("prompt", self.prompt.tensor())])?;
        Ok(Checked::new(self))
    }
}
runnable!(WriteTokens, write_tokens);

/// `out[i] = weight[table[index[i]]]`.
#[derive(Debug)]
pub struct Embed<'a, D: Device> {
    /// `[tokens]`, [`crate::PlanView::token_index`].
    pub index: &'a Index<D>,
    /// Token ids.
    pub table: &'a TokenTable<D>,
    /// `[vocab, hidden]`.
    pub weight: &'a Tensor<D>,
    /// `[tokens, hidden]`.
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> Embed<'_, D> {
    /// # Errors
    /// A shape or type is another, or the output overlaps an input.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("embed");
        check.ndim("weight", self.weight, 2)?;
        check.dense("weight", self.weight)?;
        check.float("weight", self.weight)?;
        check.dtype("out", self.out, self.weight.dtype())?;
        let tokens = self.index.tensor().dims()[0];
        check.dims("out", self.out, &[tokens, self.weight.dims()[1]])?;
        check.addresses("index", self.index, self.table.tensor().dims()[0])?;
        check.addresses("table", self.table.index(), self.weight.dims()[0])?;
        check.rows("out", self.out)?;
        check.disjoint(
            &[("out", self.out)],
            &[
                ("index", self.index.tensor()),
                ("table", self.table.tensor()),
                ("weight", self.weight),
            ],
        )?;
        Ok(Checked::new(self))
    }
}
runnable!(Embed, embed);

/// `out[i] = x[rows[i]]`.
#[derive(Debug)]
pub struct GatherRows<'a, D: Device> {
    /// `[tokens, width]`.
    pub x: &'a Tensor<D>,
    /// `[rows]`, [`crate::PlanView::logit_row`]: below `tokens`.
    pub rows: &'a Index<D>,
    /// `[rows, width]`.
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> GatherRows<'_, D> {
    /// # Errors
    /// A shape or type is another, or the output overlaps an input.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("gather_rows");
        check.ndim("x", self.x, 2)?;
        check.rows("x", self.x)?;
        check.float("x", self.x)?;
        check.dtype("out", self.out, self.x.dtype())?;
        check.dims("out", self.out, &[self.rows.tensor().dims()[0], self.x.dims()[1]])?;
        check.rows("out", self.out)?;
        check.addresses("rows", self.rows, self.x.dims()[0])?;
        check.disjoint(&[("out", self.out)], &[("x", self.x), ("rows", self.rows.tensor())])?;
        Ok(Checked::new(self))
    }
}
runnable!(GatherRows, gather_rows);
