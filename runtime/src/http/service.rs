//! What HTTP needs from the rest of the server, as a trait: the handlers' tests run against a fake.

use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::LocalBoxStream;
use keepsake_model::chat::ChatMessage;

use crate::gateway::{Gateway, ModelCard};
use crate::messages::session::{StartTurn, StoredTurn, TenantId, TurnError, TurnEvent, TurnId};
use crate::telemetry::metrics::Metrics;

/// A turn that was accepted. Dropping `events` cancels it.
pub(crate) struct RunningTurn {
    pub(crate) id: TurnId,
    /// Unix seconds.
    pub(crate) created_at: u64,
    pub(crate) events: LocalBoxStream<'static, TurnEvent>,
}

pub(crate) trait TurnService: Send + Sync {
    fn start_turn(&self, turn: StartTurn) -> LocalBoxFuture<'_, Result<RunningTurn, TurnError>>;
    fn get_turn<'a>(&'a self, tenant: &'a TenantId, id: TurnId) -> LocalBoxFuture<'a, Result<StoredTurn, TurnError>>;
    fn delete_turn<'a>(&'a self, tenant: &'a TenantId, id: TurnId) -> LocalBoxFuture<'a, Result<(), TurnError>>;
    /// Token ids of a text, with the beginning-of-sequence token if the model has one and it is asked for.
    fn encode(&self, text: String, add_bos: bool) -> LocalBoxFuture<'_, Result<Vec<u32>, TurnError>>;
    fn encode_chat(&self, messages: Vec<ChatMessage>) -> LocalBoxFuture<'_, Result<Vec<u32>, TurnError>>;
    fn decode(&self, tokens: Vec<u32>) -> LocalBoxFuture<'_, Result<String, TurnError>>;
    fn model(&self) -> &ModelCard;
    fn metrics(&self) -> &Arc<Metrics>;
    fn is_ready(&self) -> bool;
}

impl TurnService for Gateway {
    fn start_turn(&self, turn: StartTurn) -> LocalBoxFuture<'_, Result<RunningTurn, TurnError>> {
        Box::pin(async move {
            let stream = Gateway::start_turn(self, turn).await?;
            Ok(RunningTurn { id: stream.id, created_at: stream.created_at, events: Box::pin(stream) })
        })
    }

    fn get_turn<'a>(&'a self, tenant: &'a TenantId, id: TurnId) -> LocalBoxFuture<'a, Result<StoredTurn, TurnError>> {
        Box::pin(Gateway::get_turn(self, tenant, id))
    }

    fn delete_turn<'a>(&'a self, tenant: &'a TenantId, id: TurnId) -> LocalBoxFuture<'a, Result<(), TurnError>> {
        Box::pin(Gateway::delete_turn(self, tenant, id))
    }

    fn encode(&self, text: String, add_bos: bool) -> LocalBoxFuture<'_, Result<Vec<u32>, TurnError>> {
        let tokenizer = Arc::clone(self.tokenizer());
        Box::pin(self.blocking(text.len(), move || {
            let bos = tokenizer.bos().filter(|_| add_bos && tokenizer.add_bos());
            Ok(bos.into_iter().chain(tokenizer.encode(&text)).collect())
        }))
    }

    fn encode_chat(&self, messages: Vec<ChatMessage>) -> LocalBoxFuture<'_, Result<Vec<u32>, TurnError>> {
        let gateway = self.clone();
        let num_bytes = messages.iter().map(|m| m.content.len()).sum();
        Box::pin(self.blocking(num_bytes, move || gateway.render_chat(&messages)))
    }

    fn decode(&self, tokens: Vec<u32>) -> LocalBoxFuture<'_, Result<String, TurnError>> {
        let tokenizer = Arc::clone(self.tokenizer());
        Box::pin(self.blocking(0, move || Ok(tokenizer.decode(&tokens, false))))
    }

    fn model(&self) -> &ModelCard {
        Gateway::model(self)
    }

    fn metrics(&self) -> &Arc<Metrics> {
        Gateway::metrics(self)
    }

    fn is_ready(&self) -> bool {
        Gateway::is_ready(self)
    }
}

impl Gateway {
    /// Megabytes of text take long to tokenise: never on a thread that serves connections, and few at a time.
    async fn blocking<T: Send + 'static>(
        &self,
        num_bytes: usize,
        work: impl FnOnce() -> Result<T, TurnError> + Send + 'static,
    ) -> Result<T, TurnError> {
        self.check_length(num_bytes)?;
        let _tokenising = self.tokenising().await;
        match actix_web::web::block(work).await {
            Ok(result) => result,
            Err(error) => Err(TurnError::Internal(format!("tokenising failed: {error}"))),
        }
    }
}
