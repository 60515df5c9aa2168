//! The adapter store: which adapter is where (`ledger`), who holds which bytes (`pages`), and what moves
//! them (`pool`).

pub mod ledger;
pub mod pages;
pub mod pool;
