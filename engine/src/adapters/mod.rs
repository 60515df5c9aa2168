//! The adapter store: what an adapter may be called (`name`), which adapter is where (`ledger`), who
//! holds which bytes (`pages`), and what moves them (`pool`).

pub mod ledger;
pub mod name;
pub mod pages;
pub mod pool;
