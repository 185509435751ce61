import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.KStream;

/**
 * Clicks with their queries, each within 25 hours of the other, exactly once (photon bench kafka --peers).
 *
 * Topics are keyed by the query's id. Arguments: brokers, topic of queries, of clicks, of pairs, directory, threads.
 */
public class KafkaStreamsJoin {
    public static void main(String[] given) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, given[0]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, given[3] + ".streams");
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, given[4]);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, given[5]);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put("auto.offset.reset", "earliest");
        StreamsBuilder builder = new StreamsBuilder();
        KStream<byte[], String> queries = builder.stream(given[1]);
        KStream<byte[], String> clicks = builder.stream(given[2]);
        JoinWindows window = JoinWindows.ofTimeDifferenceAndGrace(Duration.ofHours(25), Duration.ofHours(1));
        clicks.join(queries, (click, query) -> "{\"click\":" + click + ",\"query\":" + query + "}", window).to(given[3]);
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(20))));
        streams.start();
    }
}
